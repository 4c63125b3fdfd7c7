"""`foretrace generate`: generate steered continuations, optionally next to unsteered ones."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.chat import Prompt, as_messages
from foretrace.cli import goal_options
from foretrace.cli.llama_generator import LlamaGenerator, build_gguf_probe, load_gguf_tokenizer
from foretrace.cli.loading import choose_device, load_lm, read_prompts
from foretrace.cli.text_generator import Generation, TextGenerator
from foretrace.gguf import is_gguf

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Generator = TextGenerator | LlamaGenerator
EPILOG = (
    "Example: foretrace generate my-lm --hmm my-hmm --goal 'nontoxic & ~formal' "
    "--prompt 'The other driver said' --compare"
)


def generate(
    model: Annotated[
        str, typer.Argument(help="The language model: a folder, a hub id, or a GGUF file.")
    ],
    hmm: goal_options.OptionalHMM = None,
    goal: Annotated[list[str] | None, goal_options.GOAL] = None,
    must_contain: goal_options.MustContain = None,
    must_not_contain: goal_options.MustNotContain = None,
    whole_words: goal_options.WholeWords = False,
    ignore_case: goal_options.IgnoreCase = False,
    prompt: Annotated[
        list[str] | None, goal_options.PromptOption(help="A prompt; repeatable.")
    ] = None,
    prompts: Annotated[
        Path | None,
        goal_options.PromptOption(
            help="A file of prompts: .jsonl, .csv, .parquet, .txt; also .xz, .gz."
        ),
    ] = None,
    column: Annotated[
        str | None,
        goal_options.PromptOption(help="The column of --prompts. Default: `prompt`, else `text`."),
    ] = None,
    chat: Annotated[
        bool,
        goal_options.PromptOption("--chat", help="Answer prompts as a user's messages in a chat."),
    ] = False,
    system: Annotated[
        str | None,
        goal_options.PromptOption(metavar="TEXT", help="A system message; implies --chat."),
    ] = None,
    attributes: goal_options.Attributes = Path(),
    probe: goal_options.ProbeFile = None,
    level: goal_options.Levels = None,
    strength: goal_options.Strengths = None,
    transform: goal_options.Transforms = None,
    after: goal_options.After = None,
    window: goal_options.Window = None,
    compare: Annotated[
        bool,
        goal_options.OutputOption(
            "--compare", help="Print unsteered and steered texts side by side."
        ),
    ] = False,
    as_json: Annotated[
        bool, goal_options.OutputOption("--json", help="Print one JSON object per prompt.")
    ] = False,
    quiet: Annotated[
        bool,
        goal_options.OutputOption(
            "--quiet", help="Print no price and no probabilities after a text."
        ),
    ] = False,
    max_new_tokens: goal_options.MaxNewTokens = 40,
    horizon: goal_options.Horizon = 64,
    neutral_end: goal_options.NeutralEnd = True,
    temperature: goal_options.Temperature = 1.0,
    top_p: goal_options.TopP = 1.0,
    batch_size: Annotated[
        int, goal_options.SamplingOption(min=1, help="Prompts per batch; 1 streams the text.")
    ] = 1,
    seed: goal_options.Seed = 0,
    device: goal_options.Device = "auto",
    dtype: goal_options.Dtype = "auto",
) -> None:
    """Generate continuations of prompts, or answers in chats. Without goals, they are unsteered."""
    from foretrace.context import Probe

    if column is not None and prompts is None:
        raise typer.BadParameter("--column is an option of --prompts, which is missing.")
    texts = [*(prompt or []), *(read_prompts(prompts, column) if prompts else [])]
    has_texts = bool(must_contain or must_not_contain)
    for option, given in (("--whole-words", whole_words), ("--ignore-case", ignore_case)):
        if given and not has_texts:
            raise typer.BadParameter(
                f"{option} is an option of --must-contain and --must-not-contain, which are "
                f"missing. In a goal, write contains(..., whole_word=True, ignore_case=True)."
            )
    has_goals = bool(goal) or has_texts
    if not has_goals:
        needs_goal = {
            "--level": level,
            "--transform": transform,
            "--after": after,
            "--window": window,
            "--compare": compare,
        }
        for option in (name for name, value in needs_goal.items() if value):
            raise typer.BadParameter(f"{option} needs a --goal, which is missing.")
    if not texts:
        raise typer.BadParameter("Pass a prompt: --prompt TEXT, or --prompts FILE.")
    if "" in texts:
        typer.echo("A prompt is empty: its continuation begins a new text.", err=True)
    settings = goal_options.check_settings(strength, level, transform, neutral_end, len(goal or []))
    goal_options.check_goals(attributes, goal or [])
    lm = goals = loaded_hmm = None
    build_probe: goal_options.BuildProbe
    if is_gguf(model):
        _require_llama_options(batch_size, dtype)
        tokenizer = load_gguf_tokenizer(model)
        build_probe = partial(build_gguf_probe, model)
        if has_goals:
            chosen = choose_device(device)
            loaded_hmm = goal_options.load_or_measure_gguf_hmm(hmm, model, tokenizer, chosen)
    else:
        lm, tokenizer = load_lm(model, dtype, device)
        build_probe = goal_options.probe_builder(lm, tokenizer)
        if has_goals:
            loaded_hmm = goal_options.load_or_measure_hmm(hmm, lm, tokenizer)
    if loaded_hmm is not None:
        goals = goal_options.load_goals(
            loaded_hmm,
            tokenizer,
            attributes,
            goal or [],
            settings,
            horizon,
            must_contain,
            must_not_contain,
            whole_words=whole_words,
            ignore_case=ignore_case,
            build_probe=build_probe if probe is None else partial(Probe.load, probe),
            after=after,
            window=window,
        )
    prompt_list: list[Prompt] = list(texts)
    if chat or system is not None:
        prompt_list = [as_messages(text, system) for text in texts]
    generator: Generator
    if lm is None:
        generator = LlamaGenerator.load(
            model,
            tokenizer,
            goals,
            prompt_list,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            device=device,
        )
    else:
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
        generator = TextGenerator(lm, tokenizer, goals, options)
    for start in range(0, len(prompt_list), batch_size):
        batch, batch_seed = prompt_list[start : start + batch_size], seed + start
        if as_json:
            _print_json(generator, batch, batch_seed, compare)
        elif compare:
            _print_side_by_side(generator, batch, batch_seed)
        else:
            _print_texts(generator, batch, batch_seed, quiet)


def _require_llama_options(batch_size: int, dtype: str) -> None:
    """Refuse the options that llama.cpp has no counterpart of."""
    if batch_size > 1:
        raise typer.BadParameter(
            "--batch-size must be 1 for a GGUF file: llama.cpp generates one text at a time."
        )
    if dtype != "auto":
        raise typer.BadParameter("--dtype must be auto for a GGUF file, which has its own dtypes.")


def _print_texts(generator: Generator, prompts: Sequence[Prompt], seed: int, quiet: bool) -> None:
    """Print each prompt with its continuation; stream the text of a single prompt.

    The price and the probabilities go to standard error, so that standard output has the texts.
    """
    shown: str | None = None

    def print_new(text: str) -> None:
        nonlocal shown
        if shown is None:  # generation has begun: an error would have been printed before
            typer.secho(_shown(prompts[0]), bold=True, nl=False)
        typer.echo(text.removeprefix(shown or ""), nl=False)
        shown = text

    generations = generator.generate(prompts, seed, on_text=print_new)
    for prompt, generation in zip(prompts, generations, strict=True):
        if len(prompts) == 1:
            print_new(generation.text)
        else:
            typer.secho(_shown(prompt), bold=True, nl=False)
            typer.echo(generation.text, nl=False)
        typer.echo()
        results = _results(generator, generation)
        if results and not quiet:
            typer.secho("; ".join(results), dim=True, err=True)
        typer.echo()


def _results(generator: Generator, generation: Generation) -> list[str]:
    """Return the price of a text and the probability of each goal, in words."""
    results = []
    if generation.price is not None:
        results.append(f"price {generation.price:.3f} nats per token")
    if generator.goals is not None and generation.probability:
        for one, value in zip(generator.goals.attributes, generation.probability, strict=True):
            if one.has_weights:
                results.append(f"probability of {one.name} {value:.3f} (by the attribute itself)")
            else:
                results.append(f"{one.name}: {'met' if value == 1 else 'not met'}")
    return results


def _print_side_by_side(generator: Generator, prompts: Sequence[Prompt], seed: int) -> None:
    """Print unsteered and steered texts in two columns, with streaming."""
    from rich.live import Live

    table = partial(_table, generator, prompts)
    with Live() as live:
        unsteered = generator.generate(
            prompts,
            seed,
            steered=False,
            on_text=lambda text: live.update(table([Generation(text)], [])),
        )
        steered = generator.generate(
            prompts,
            seed,
            on_text=lambda text: live.update(table(unsteered, [Generation(text)])),
        )
        live.update(table(unsteered, steered))
    if not live.console.is_terminal:
        typer.echo()  # outside a terminal, Live does not end the last line
    if [row.text for row in unsteered] == [row.text for row in steered]:
        typer.echo("The goal changed nothing here. Try --level strong, or another --seed.")
    if generator.goals is not None and generator.goals.goal.min_tokens:
        typer.echo("The price includes the required text, which is no part of a level's price.")


def _table(
    generator: Generator,
    prompts: Sequence[Prompt],
    unsteered: Sequence[Generation],
    steered: Sequence[Generation],
) -> "Table":
    """Build a table with a row per prompt: the unsteered text (`bare`) and the steered text."""
    from itertools import zip_longest

    from rich.table import Table

    table = Table("bare", "steered", expand=True, show_lines=True)
    for column in table.columns:
        column.ratio = 1
    for prompt, *generations in zip_longest(prompts, unsteered, steered):
        table.add_row(*(_cell(generator, prompt, one or Generation("")) for one in generations))
    return table


def _shown(prompt: Prompt) -> str:
    """Return the text to print before the generated one."""
    return prompt if isinstance(prompt, str) else f"{prompt[-1]['content']}\n"


def _cell(generator: Generator, prompt: Prompt, generation: Generation) -> "Text":
    from rich.text import Text  # keeps texts from being parsed as markup

    cell = Text.assemble((_shown(prompt), "dim"), generation.text)
    cell.append("".join(f"\n{result}" for result in _results(generator, generation)), "cyan")
    return cell


def _print_json(generator: Generator, prompts: Sequence[Prompt], seed: int, compare: bool) -> None:
    """Print a JSON object per prompt; with `compare`, the unsteered text is under `bare`."""
    steered = generator.generate(prompts, seed)
    unsteered = generator.generate(prompts, seed, steered=False) if compare else []
    for index, prompt in enumerate(prompts):
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        row: dict[str, Any] = {"prompt": text, **_json_fields(steered[index])}
        if compare:
            row["bare"] = _json_fields(unsteered[index])
        typer.echo(json.dumps(row, ensure_ascii=False))


def _json_fields(generation: Generation) -> dict[str, Any]:
    fields = {"text": generation.text, "probability": generation.probability}
    return fields if generation.price is None else {**fields, "price": generation.price}
