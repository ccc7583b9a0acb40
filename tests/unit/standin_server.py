"""A stand-in for an SGLang server: its endpoints and the shape of its answers, without a model. Real ones are in tests/engine."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StandIn:
    """What the stand-in says and does."""

    algorithm: str | None = "EAGLE3"
    num_steps: int = 3
    accepted: tuple[int, ...] = (3, 0)
    """Drafts accepted in verify step 1, 2, ...; repeated."""
    step_s: float = 0.0
    old_names: bool = False
    """Name the fields of meta_info as 0.5.9 does."""
    mean_length: float | None = None
    templates: bool = True
    """/tokenize takes messages."""
    ids_only: bool = False
    metrics: str | None = None
    api_key: str | None = None
    answer: str = "x"
    release: str = "0.5.23"
    url: str = ""
    sent: list[dict[str, Any]] = field(default_factory=list)
    flushed: int = 0

    def info(self) -> dict[str, Any]:
        return {
            "version": self.release,
            "model_path": "/models/target",
            "speculative_draft_model_path": "/models/draft" if self.algorithm else None,
            "speculative_algorithm": self.algorithm,
            "speculative_num_steps": self.num_steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.num_steps + 1,
            "disable_cuda_graph": False,
            "skip_tokenizer_init": self.ids_only,
            "internal_states": [{"avg_spec_accept_length": self.mean_length} if self.mean_length else {}],
        }

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        wanted = body["sampling_params"]["max_new_tokens"]
        tokens, steps, histogram = 1, 0, [0] * (self.num_steps + 1)
        meta: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 1, "cached_tokens": 0}
        yield {"text": self.answer, "meta_info": meta}
        while tokens < wanted:
            time.sleep(self.step_s)
            taken = self.accepted[steps % len(self.accepted)] if self.algorithm else 0
            taken = min(taken, wanted - tokens - 1)
            histogram[taken] += 1
            tokens, steps = tokens + taken + 1, steps + 1
            meta = meta | {"completion_tokens": tokens}
            if self.algorithm:
                correct = sum(j * count for j, count in enumerate(histogram))
                names = ("spec_accept_histogram", "spec_accept_token_num") if self.old_names else _NEW
                meta |= {"spec_verify_ct": steps, names[0]: histogram[:], names[1]: correct}
            yield {"text": self.answer * tokens, "meta_info": meta}


_NEW = ("spec_correct_drafts_histogram", "spec_num_correct_drafts")


@contextlib.contextmanager
def serving(standin: StandIn, port: int = 0) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _say(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/health":
                self._say(200, b"")
            elif standin.api_key and self.headers.get("Authorization") != f"Bearer {standin.api_key}":
                self._say(401, b"{}")
            elif self.path == "/server_info":
                self._say(200, json.dumps(standin.info()).encode())
            elif self.path == "/metrics" and standin.metrics is not None:
                self._say(200, standin.metrics.encode(), "text/plain")
            else:
                self._say(404, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
            if self.path == "/flush_cache":
                standin.flushed += 1
                self._say(200, b"ok", "text/plain")
            elif self.path == "/tokenize":
                self._say(*((200, b'{"tokens": [1, 2, 3]}') if standin.templates else (400, b"{}")))
            elif self.path == "/generate":
                standin.sent.append(body)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for event in standin.events(body):
                    self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")
            else:
                self._say(404, b"{}")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    standin.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield standin
    finally:
        server.shutdown()
        server.server_close()
