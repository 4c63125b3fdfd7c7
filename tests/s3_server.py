"""An object store over HTTP that fails now and then: moto's server behind failures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from time import sleep
from typing import Any


class Failures:
    """Passes requests on to an application, but answers some with 500 or too late."""

    def __init__(self, application: Callable[..., Any], every: int, delay: float) -> None:
        self.application, self.every, self.delay = application, every, delay
        self.requests = self.failed = self.late = 0

    def __call__(self, environment: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        self.requests += 1
        if self.requests % self.every == 0:
            self.failed += 1
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if self.requests % (5 * self.every) == 1:
            self.late += 1
            sleep(self.delay)
        return self.application(environment, start_response)


@contextmanager
def serve(every: int, delay: float) -> Iterator[tuple[str, Failures]]:
    """Serve; yield the address, and the counts of failures."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    failures = Failures(DomainDispatcherApplication(create_backend_app), every, delay)
    server = make_server("127.0.0.1", 0, failures, threaded=True)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}", failures
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
