"""An engine as far as the gateway can see one: real HTTP on a Unix socket, answers made up, adapters by name.

It scores what a checkpoint's own probe says, so a publication of that checkpoint is proven and of another is
not. For tests of the gateway's life that need no tokens from a model.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.numpy import load_file

from runtime.shared.manifest import read
from tests.runtime.trainer_fixtures import EOS, VOCABULARY
from tests.support.waiting import wait_until_async


class PretendEngine:
    """`asked` counts chat requests by their text; `adapters` maps names to folders, read when loaded.

    `off`: how far what it scores is from the checkpoint's own word; `refuses`: why it loads no adapter;
    `says`: its answer to messages, the text of the last of them.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.asked: Counter[str] = Counter()
        self.adapters: dict[str, Path] = {}
        self.off = 0.0
        self.refuses = ""
        self.says: Callable[[list[dict[str, Any]]], str] = lambda messages: messages[-1]["content"]
        # Names it was asked to load; it does so once `loads` is set.
        self.loading: list[str] = []
        self.loads = threading.Event()
        self.loads.set()
        self._probes: dict[str, dict[str, Any]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _serve(self) -> None:
        application = web.Application()
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/collective_rpc", self._rpc),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._score),
            ]
        )
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        names = ["base", *self.adapters]
        return web.json_response({"data": [{"id": name, "max_model_len": 512} for name in names]})

    async def _rpc(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["method"] == "sampling":
            return web.json_response({"results": [{"logprobs_mode": "processed_logprobs"}]})
        manifest = read(self.adapters[asked["args"][0]].parent, verify=True)
        report = {"modules": 14, "expected": 14, "mismatched": [], "sha256": manifest["adapter_sha256"]}
        return web.json_response({"results": [report]})

    async def _load(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.loading.append(asked["lora_name"])
        await wait_until_async(self.loads.is_set)
        if self.refuses:
            return web.json_response({"error": {"message": self.refuses}}, status=400)
        if asked["lora_name"] in self.adapters:
            return web.json_response({"error": {"message": "already loaded"}}, status=400)
        self.adapters[asked["lora_name"]] = Path(asked["lora_path"])
        self._probes[asked["lora_name"]] = load_file(Path(asked["lora_path"]).parent / "probe.safetensors")
        return web.Response()

    async def _unload(self, request: web.Request) -> web.Response:
        if self.adapters.pop((await request.json())["lora_name"], None) is None:
            return web.json_response({"error": {"message": "not loaded"}}, status=404)
        return web.Response()

    async def _chat(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["model"] not in ("base", *self.adapters):
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        self.asked[asked["messages"][-1]["content"]] += 1
        text = self.says(asked["messages"])
        ids = [3 + (hash(text) + place) % (VOCABULARY - 3) for place in range(5)] + [EOS]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": [{"token": "?", "logprob": -2.0, "bytes": []} for _ in ids]},
            "finish_reason": "stop",
            "token_ids": ids,
        }
        body = {"id": "c", "model": asked["model"], "choices": [choice], "prompt_token_ids": [5, 6, 7]}
        return web.json_response(body)

    async def _score(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if "logprob_token_ids" in asked:  # of the token that comes next, as a rollout asks
            (token,) = asked["logprob_token_ids"]
            value = self._logprobs(asked["model"], [*asked["prompt"], token])[-1]
            top = [{f"token_id:{token}": float(value)}]
            return web.json_response({"choices": [{"logprobs": {"top_logprobs": top}}]})
        found = self._logprobs(asked["model"], asked["prompt"])
        rows: list[Any] = [None]
        rows += [
            {str(token): {"logprob": float(value)}}
            for token, value in zip(asked["prompt"][1:], found[1:], strict=True)
        ]
        return web.json_response({"choices": [{"prompt_logprobs": rows}]})

    def _logprobs(self, model: str, tokens: list[int]) -> list[float]:
        """What the trainer says of these tokens in the probe of an adapter (of any, for the base)."""
        which = "logprobs_base" if model == "base" else "logprobs_policy"
        for probe in self._probes.values() if model == "base" else [self._probes[model]]:
            for start, end in itertools.pairwise(probe["offsets"].tolist()):
                if probe["tokens"][start:end].tolist()[: len(tokens)] == tokens:
                    scored = probe[which][start : start + len(tokens)]
                    return (scored if model == "base" else scored + self.off).tolist()
        raise AssertionError(f"no probe has {tokens}")
