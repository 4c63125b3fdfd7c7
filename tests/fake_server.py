"""A local HTTP server that stands in for services: the Perspective API, a server of an LM."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
"""A function from the body of a request to a status and the answer: JSON, or bytes."""


@contextmanager
def fake_server(answer: Answer) -> Iterator[str]:
    """Serve answers, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body |= {"path": self.path, "key": self.headers.get("Authorization")}
            status, content = answer(body)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", content["location"])
            self.end_headers()
            self.wfile.write(
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chat_answer(
    text: str, *, finished: bool = True, first_token: dict[str, float] | None = None
) -> tuple[int, Any]:
    """Return an answer of a chat as OpenAI's interface has it."""
    candidates = [
        {"token": token, "logprob": value} for token, value in (first_token or {}).items()
    ]
    choice = {
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop" if finished else "length",
        "logprobs": {"content": [{"top_logprobs": candidates}]} if first_token else None,
    }
    return 200, {"choices": [choice]}
