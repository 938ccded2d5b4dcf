"""Stands in for ``swift rollout``, a vLLM server, with the answers that ms-swift's client needs: PORT FILE

It writes to the file once it listens. With BREAK_ENGINE it breaks at a place, the second time that it comes there.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.swift import engine_double

ANSWERS: dict[str, Any] = {
    "/get_world_size/": {"world_size": 1},
    "/get_engine_type/": {"engine_type": "LLM", "enable_lora": False, "enable_multi_turn": False, "gym_env": False},
}
PLACES = {"/infer/": "generate", "/update_flattened_params/": "load"}
calls = Counter[str]()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(ANSWERS.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        calls[self.path] += 1
        if calls[self.path] == 2 and self.path in PLACES:
            engine_double.strike(PLACES[self.path])
        if self.path == "/infer/":
            found = engine_double.responses(body["infer_requests"])
            self.answer([{"response": asdict(response)} for response in found])
        else:
            self.answer(ANSWERS.get(self.path, {}))

    def answer(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None: ...


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    Path(sys.argv[2]).touch()
    server.serve_forever()
