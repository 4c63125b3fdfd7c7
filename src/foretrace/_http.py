"""Send JSON to a server: with a timeout, repeated after temporary failures, of bounded size."""

import json
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from foretrace.errors import ServerError, ServerUnavailableError, reason

MAX_ANSWER = 1 << 20  # bytes
RETRIED_STATUS = {408, 429, 500, 502, 503, 504}
REFUSED_STATUS = {401, 403, 404}  # as for all further requests


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects: the next server would get the key too."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def post_json(
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    timeout: float = 60.0,
    attempts: int = 5,
    pause: float = 0.5,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Send a JSON object, and return the JSON that the server answers.

    After a temporary failure, the request is repeated. The pause before doubles every time.

    Raises:
        ServerUnavailableError: If the server cannot be reached, or refuses the key or the address.
        ServerError: If this request is not answered.
    """
    request = Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    host = request.host
    for attempt in range(attempts):
        if attempt:
            sleep(pause * 2 ** (attempt - 1))
        try:
            with build_opener(_NoRedirect).open(request, timeout=timeout) as response:
                answer = response.read(MAX_ANSWER + 1)
            if len(answer) > MAX_ANSWER:
                raise ServerError(f"{host} answered with more than {MAX_ANSWER:,} bytes.")
            return json.loads(answer)
        except HTTPError as error:
            with error:
                message = f"{error.code} {error.reason}: {_error_message(error)}"
            if error.code in REFUSED_STATUS:
                raise ServerUnavailableError(
                    f"{host} refuses requests ({message}). Check the address, the key and the name "
                    f"of the model."
                ) from error
            failure = ServerError(f"{host} answered {message}")
            if error.code not in RETRIED_STATUS:
                raise failure from error
        except TimeoutError:
            failure = ServerError(f"{host} did not answer within {timeout:g} s")
        except (OSError, HTTPException) as error:  # no connection, or it broke
            cause = error.reason if isinstance(error, URLError) else error
            text = reason(cause) if isinstance(cause, BaseException) else cause
            if isinstance(cause, TimeoutError):
                failure = ServerError(f"{host} did not answer within {timeout:g} s")
            else:
                failure = ServerUnavailableError(f"{host} cannot be reached ({text}).")
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{host} did not answer with JSON ({reason(error)})") from error
    raise failure


def _error_message(error: HTTPError) -> str:
    """Return the message of a failed request's answer: of OpenAI's form, or its first line."""
    text = error.read(10_000).decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError, RecursionError):
        return (text.strip().splitlines() or ["no message"])[0][:200]
