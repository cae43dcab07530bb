"""Hides likely secrets in a text that is kept for people.

Known secrets are hidden by their values (`launcher/base/log.py`); this is for unknown ones: a key in a
document, a token that a tool printed. They are found by their issuers' formats, so that ordinary text stays
unchanged; a password without a format is not seen. Standard library only.
"""

from __future__ import annotations

import re

HIDDEN = "***"

# Forms as their issuers document them; the lengths are the shortest in use.
_FORMS = (
    r"sk-[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic, OpenRouter and others
    r"hf_[A-Za-z0-9]{20,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{30,}",  # GitHub, and the next
    r"github_pat_[A-Za-z0-9_]{30,}",
    r"glpat-[A-Za-z0-9_-]{20,}",  # GitLab
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
    r"(?:AKIA|ASIA)[0-9A-Z]{16}",  # AWS
    r"AIza[A-Za-z0-9_-]{35,}",  # Google
)
_BARE = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(_FORMS)})")
# A JSON web token, behind the beginning of its word. The text after a word is searched once, and not from
# each place in it at which a token may begin: for a text that is one long word that would take quadratic
# time.
_OF_WORD = "[A-Za-z0-9_-]"
_PART = f"eyJ{_OF_WORD}{{10,}}+"
_WEB_TOKEN = re.compile(
    rf"(?<!{_OF_WORD})(?={_OF_WORD}++\.{_PART}\.{_OF_WORD}{{10}})"
    rf"({_OF_WORD}*?)(?<![A-Za-z0-9_]){_PART}\.{_PART}\.{_OF_WORD}{{10,}}+"
)
_KEY = re.compile(
    r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----).*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.DOTALL
)
# Text behind these words is secret in any form; the word itself stays.
_BEHIND = re.compile(
    r"(?i)(\bbearer\s{1,3}|(?:api[_-]?key|secret[_-]?(?:access[_-]?)?key|password|passwd|_token)"
    r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?)(?=[^\s\"',;]{0,200}\d)[^\s\"',;]{12,}"
)
# https://user:password@host
_IN_URL = re.compile(r"(://[^\s/:@]{1,100}:)[^\s/@]{3,}(@)")


def hide(text: str) -> str:
    """`text` with `***` in place of everything that looks like a secret."""
    text = _KEY.sub(rf"\1{HIDDEN}", text)
    text = _BARE.sub(HIDDEN, text)
    text = _WEB_TOKEN.sub(rf"\1{HIDDEN}", text)
    text = _IN_URL.sub(rf"\1{HIDDEN}\2", text)
    return _BEHIND.sub(rf"\1{HIDDEN}", text)
