"""Runs in the Python of the user's program: tells whether it can parse the program and finds its imports.

That Python (3.8 or newer) runs it without our packages: `program_check.py` hands it the text of this file.
Nothing of the program is executed, and no module of the user's is imported. The program is compiled, and its
finders look for each name on the path that the program will have.

The certainty that a name is missing depends on the code that runs before its import:
    CERTAIN   imports of the standard library and of packages that are seen to supply nothing, constants
    LIKELY    other imports, calls, branches: one of them might supply it
    UNKNOWN   the path of imports is changed, or something is run that may install a package
"""

from __future__ import annotations

import ast
import os
import sys

MARK = "slipway-asked "
CERTAIN, LIKELY, UNKNOWN = 2, 1, 0
# Importing one of these adds nothing to the path and no finder of names other than its own: seen in a
# process of its own for each (a test does it again).
WITHOUT_FINDERS = frozenset(
    {"aiohttp", "click", "dotenv", "dspy", "gepa", "httpx", "jinja2", "launcher", "litellm", "numpy"}
    | {"openai", "optuna", "orjson", "pandas", "psutil", "pydantic", "requests", "rich", "tenacity", "tqdm"}
    | {"typer", "yaml"}
)  # fmt: skip
# Finders that give the same answer at every call; by the module that made them.
_KNOWN_FINDERS = ("_frozen_importlib", "zipimport", "_distutils_hack", "__editable__", "_virtualenv")
# Ours offers these names once it is imported (client/arbor/supplied_names.py).
_ARBOR, _OF_OUR_ARBOR = "arbor", frozenset({"peft"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# A program that uses one of these names may change the path of imports, or install something.
_DYNAMIC_IMPORT = frozenset(
    {"__import__", "builtins", "eval", "exec", "globals", "imp", "importlib", "pip", "pkgutil", "runpy"}
    | {"site", "subprocess"}
)  # fmt: skip
_SAFE_ATTRIBUTES = {
    "sys": frozenset({"argv", "executable", "platform", "stderr", "stdin", "stdout", "version_info"}),
    "os": frozenset({"environ", "getenv", "name", "path", "sep"}),
}
_SAFE_CALLS = frozenset(
    {"Path", "bool", "dataclass", "dataclasses.dataclass", "dict", "dotenv.load_dotenv", "float", "frozenset"}
    | {"int", "list", "load_dotenv", "logging.basicConfig", "logging.getLogger", "os.environ.get"}
    | {"os.environ.setdefault", "os.getenv", "pathlib.Path", "print", "set", "str", "tuple"}
    | {"warnings.filterwarnings", "warnings.simplefilter"}
)  # fmt: skip
_NAMES_OF_CALLS = frozenset(name.partition(".")[0] for name in _SAFE_CALLS)
_PLAIN = (
    ast.Import, ast.ImportFrom, ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Pass, ast.If, ast.Try,
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler,
)  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main(path: list[str], script: str) -> None:
    """Print the answer for the program `script`. `path`: this Python's own, begun with `-c`."""
    beside = os.path.dirname(os.path.realpath(script))
    # `-P` and `-I` put no folder there; else it is the script's.
    sys.path[:] = [beside, *path[1:]] if path[:1] == [""] else path
    sys.stdout.write(f"{MARK}{answer(script)!r}\n")


def answer(script: str) -> dict[str, object]:
    """`syntax`: the line and the error there; `missing`: a name, its line, and the certainty."""
    result: dict[str, object] = {"version": "{}.{}.{}".format(*sys.version_info[:3])}
    with open(script, "rb") as file:
        text = file.read()
    try:
        compile(text, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        return {**result, "syntax": (error.lineno or 0, str(error.msg))}
    return {**result, "missing": first_missing(ast.parse(text), script)}


def first_missing(tree: ast.Module, script: str) -> tuple[str, int, int] | None:
    """The first name that is imported at the top, unguarded, and not found: with its line, and how sure."""
    local = _local(script)
    sure = CERTAIN if _only_known_finders() else UNKNOWN
    supplied: frozenset[str] = frozenset()
    for statement in tree.body:
        names = _names(statement)
        for name in names:
            if name not in supplied and not found(name):
                return name, statement.lineno, sure
        if _ARBOR in names and _is_our_arbor():
            supplied = _OF_OUR_ARBOR
        sure = min(sure, confidence(statement, local))
    return None


def confidence(statement: ast.stmt, local: set[str]) -> int:
    """The confidence, after this statement, that a missing name is really missing. `local`: folders of the
    user's own."""
    sure = CERTAIN
    for node in _run_at_once(statement):
        if isinstance(node, ast.stmt) and not isinstance(node, _PLAIN):
            sure = min(sure, LIKELY)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            sure = min(sure, _of_import(node, local))
        elif isinstance(node, ast.Call):
            sure = min(sure, CERTAIN if _dotted(node.func) in _SAFE_CALLS else LIKELY)
        elif isinstance(node, ast.Name) and node.id in _DYNAMIC_IMPORT:
            sure = UNKNOWN
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _NAMES_OF_CALLS:
            sure = min(sure, LIKELY)  # it may be anything from here on
        elif isinstance(node, ast.Attribute):
            sure = min(sure, _of_attribute(node))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            sure = min(sure, CERTAIN if _dotted(node.value) == "os.environ" else LIKELY)
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            decorated = [_dotted(one) for one in node.decorator_list if not isinstance(one, ast.Call)]
            known = node.name not in _NAMES_OF_CALLS and all(name in _SAFE_CALLS for name in decorated)
            sure = min(sure, CERTAIN if known else LIKELY)
    return sure


def found(name: str) -> bool:
    """Whether `import name` finds something with the present finders; nothing is imported."""
    return name in sys.modules or _spec(name) is not None


# ------------------------------------------------------------------ how


def _names(statement: ast.stmt) -> list[str]:
    """The names that a statement at the top imports, each up to its first dot."""
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module.partition(".")[0]]
    return []


def _run_at_once(node: ast.AST) -> list[ast.AST]:
    """The node and all below it that runs when it does."""
    below = [
        child
        for field, value in ast.iter_fields(node)
        for child in (value if isinstance(value, list) else [value])
        if isinstance(child, ast.AST) and not (field == "body" and _is_later(node))
    ]
    return [node, *(each for child in below for each in _run_at_once(child))]


def _is_later(node: ast.AST) -> bool:
    """Whether its body does not run at import: a function's, and code for type checkers alone."""
    if isinstance(node, ast.If):
        return _dotted(node.test).rpartition(".")[2] == "TYPE_CHECKING"
    return isinstance(node, (*_FUNCTIONS, ast.Lambda))


def _of_import(node: ast.Import | ast.ImportFrom, local: set[str]) -> int:
    names = _names(node)
    if not names or any(_hides(name, node) for name in names):
        return UNKNOWN
    return CERTAIN if all(_adds_no_modules(name, local) for name in names) else LIKELY


def _hides(name: str, node: ast.Import | ast.ImportFrom) -> bool:
    """Whether a name that may change imports gets another name by this import."""
    if isinstance(node, ast.ImportFrom):
        safe = _SAFE_ATTRIBUTES.get(name, frozenset())
        return (name in _DYNAMIC_IMPORT or name in _SAFE_ATTRIBUTES) and not all(
            one.name in safe for one in node.names
        )
    return any(
        one.asname and one.name.partition(".")[0] in _DYNAMIC_IMPORT | _SAFE_ATTRIBUTES.keys()
        for one in node.names
    )


def _adds_no_modules(name: str, local: set[str]) -> bool:
    spec = _spec(name)
    if spec is None:
        return name in sys.modules
    place = _folder(spec)
    library: frozenset[str] = getattr(sys, "stdlib_module_names", frozenset(sys.builtin_module_names))
    if name in library:
        return place is None or place not in local
    kind = os.path.basename(place or "")
    if name == _ARBOR:
        return _is_our_arbor()
    return name in WITHOUT_FINDERS and (kind in _INSTALLED or name == "launcher")


def _is_our_arbor() -> bool:
    """Ours stands in a folder of its own, first on the path."""
    return os.path.basename(_folder(_spec(_ARBOR)) or "") == "on_path"


def _of_attribute(node: ast.Attribute) -> int:
    holder = _dotted(node.value).rpartition(".")[2]  # `sys` of `logging.sys.path` as well
    if node.attr in _DYNAMIC_IMPORT or (
        holder in _SAFE_ATTRIBUTES and node.attr not in _SAFE_ATTRIBUTES[holder]
    ):
        return UNKNOWN
    return LIKELY if isinstance(node.ctx, (ast.Store, ast.Del)) else CERTAIN


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression; empty for another one."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _spec(name: str) -> object | None:
    for finder in sys.meta_path:
        ask = getattr(finder, "find_spec", None)
        spec = ask(name, None) if ask is not None else None
        if spec is not None:
            return spec
    return None


def _folder(spec: object) -> str | None:
    """The entry of the path that a module was found in; None for one that is built in."""
    places: list[str] = list(getattr(spec, "submodule_search_locations", None) or [])
    origin: str | None = getattr(spec, "origin", None) if getattr(spec, "has_location", False) else None
    inside = places[0] if places else origin
    return None if inside is None else os.path.realpath(os.path.dirname(inside))


def _local(script: str) -> set[str]:
    """Folders whose modules are the user's own: beside the program, and those of PYTHONPATH."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {os.path.realpath(one) for one in (os.path.dirname(os.path.realpath(script)), *named)}


def _only_known_finders() -> bool:
    made = [getattr(one, "__module__", "") or "" for one in (*sys.meta_path, *sys.path_hooks)]
    return all(name.startswith(_KNOWN_FINDERS) for name in made)
