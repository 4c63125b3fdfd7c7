"""A judge that asks a language model on a server."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foretrace.chat import Messages, as_messages
from foretrace.chat_server import Answer, ChatServer
from foretrace.errors import ServerError, ServerUnavailableError
from foretrace.evaluate.judges import Judge, Score

TEXT = "{text}"
MAX_TOKENS = 1024  # of an answer with a number: some models reason first
NUM_CANDIDATES = 20  # first tokens whose log-probabilities are requested


def server_judge(server: ChatServer, question: str) -> Judge:
    """Build a judge that asks a language model a question about every text.

    If the server gives log-probabilities, the score is the probability of *yes* against *no* as the
    first token of the answer. Else it is a number from 0 to 100 in the answer, divided by 100. One
    request finds out which.

    Args:
        server: The server.
        question: A question that *yes* answers for texts with the attribute, such as "Is this text
            formal?". The text follows it, or replaces `{text}` in it.

    Returns:
        The judge.

    Raises:
        ServerUnavailableError: If the server cannot be reached, or refuses every request.
    """
    form = _YES_OR_NO if _gives_log_probabilities(server, question) else _NUMBER

    def score(texts: list[str]) -> list[Score]:
        chats = [form.chat(question, text) for text in texts]
        answers = server.answer_all(chats, temperature=0, **form.options)
        return [None if answer is None else form.score(answer) for answer in answers]

    name = json.dumps(["server", server.address, server.model, question, form.instruction])
    return Judge(name, score)


@dataclass(frozen=True)
class _Form:
    """How the model is asked to answer, and how its answer is read."""

    instruction: str
    options: dict[str, Any]
    score: Callable[[Answer], Score]

    def chat(self, question: str, text: str) -> Messages:
        asked = question if TEXT in question else f"{question}\n\nText: {TEXT}"
        return as_messages(f"{asked.replace(TEXT, text)}\n\n{self.instruction}")


def _yes_or_no(answer: Answer) -> Score:
    """Return the probability of yes among yes and no; None if neither is a likely first token."""
    totals = {"yes": 0.0, "no": 0.0}
    for token, log_probability in answer.first_token.items():
        word = token.strip(" \n\"'.*").casefold()
        if word in totals:
            totals[word] += math.exp(min(log_probability, 0.0))
    both = totals["yes"] + totals["no"]
    return totals["yes"] / both if both else None


def _number(answer: Answer) -> Score:
    """Return the last number of an answer, but not the 100 of `85/100`, divided by 100."""
    text = re.sub(r"(/|\bout of|\bto|\bof)\s*100\b", "", answer.text.rpartition("</think>")[2])
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text[-1000:])
    score = float(numbers[-1]) / 100 if numbers else -1.0
    return score if 0 <= score <= 1 else None


_YES_OR_NO = _Form(
    "Answer with yes or no only.",
    {"max_tokens": 1, "logprobs": True, "top_logprobs": NUM_CANDIDATES},
    _yes_or_no,
)
_NUMBER = _Form(
    "Answer with one number from 0 (not at all) to 100 (entirely), and nothing else.",
    {"max_tokens": MAX_TOKENS},
    _number,
)


def _gives_log_probabilities(server: ChatServer, question: str) -> bool:
    try:
        chat = _YES_OR_NO.chat(question, "This is an example.")
        answer = server.answer(chat, temperature=0, **_YES_OR_NO.options)
    except ServerUnavailableError:
        raise
    except ServerError:  # some servers refuse the option
        return False
    return _yes_or_no(answer) is not None
