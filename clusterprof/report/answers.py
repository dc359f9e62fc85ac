"""What an answer cost, and two answers side by side."""

from typing import TYPE_CHECKING

from clusterprof.report.numbers import size_text

if TYPE_CHECKING:
    from rich.table import Table

    from clusterprof.cli._answer import Answer


def answer_summary(answer: "Answer", *, prompt_tokens: int, kept_tokens: int) -> str:
    """Return memory and speed of one answer in a line."""
    facts = [f"{prompt_tokens:,} prompt tokens, {kept_tokens:,} kept"]
    facts.append(f"KV cache {size_text(answer.kv_bytes)} instead of {size_text(answer.kv_bytes_full)}")
    facts.append(_speed(answer))
    return "; ".join(facts)


def comparison_table(full: "Answer", compressed: "Answer", *, kept_tokens: int) -> "Table":
    """Return both answers side by side, each with what it cost."""
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True)
    for heading, answer in (("full cache", full), (f"{kept_tokens:,} tokens kept", compressed)):
        table.add_column(
            heading,
            footer=f"KV cache {size_text(answer.kv_bytes)}; {_speed(answer)}",
            ratio=1,
            overflow="fold",
        )
    table.show_footer = True
    table.add_row(Text(full.text.strip()), Text(compressed.text.strip()))
    return table


def comparison_summary(full: "Answer", compressed: "Answer") -> str:
    """Return how much smaller and faster the compressed run was, and whether the answers are the same."""
    smaller = full.kv_bytes / compressed.kv_bytes
    facts = [f"KV cache {smaller:.1f} times smaller" if smaller > 1 else "KV cache as large as without"]
    if full.decode_tokens_per_s and compressed.decode_tokens_per_s:
        ratio = compressed.decode_tokens_per_s / full.decode_tokens_per_s
        facts.append(f"decoding {ratio:.2f} times as fast")
    facts.append("the answers are the same" if full.text == compressed.text else "the answers differ")
    return "; ".join(facts)


def _speed(answer: "Answer") -> str:
    first = f"first token after {answer.prefill_s:.1f} s"
    rate = answer.decode_tokens_per_s
    return first if rate is None else f"{first}, then {rate:.1f} tokens/s"
