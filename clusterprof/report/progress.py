"""What a tune is doing: live bars on a terminal, a plain line now and then in a log."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from clusterprof.methods import METHODS
from clusterprof.report.console import say
from clusterprof.report.display import display_for
from clusterprof.report.numbers import HOLD_OUT_MORE, counted, duration_text, parameters_text, size_text
from clusterprof.statistics import FEWEST_TO_TELL

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial
    from rich.console import Console

    from clusterprof.data import Prompt
    from clusterprof.profile import DroppedSample
    from clusterprof.profiling.samples import Samples
    from clusterprof.profiling.settings import TuneSettings


class TuneProgress:
    """A `TuneListener` that shows the tune on a console; a context manager that clears up after itself.

    Parameters
    ----------
    console : Console
        For people, on stderr.
    settings : TuneSettings
        What the tune was asked for.
    """

    def __init__(self, console: "Console", settings: "TuneSettings") -> None:
        self._console, self._settings = console, settings
        self._display = display_for(console)
        self._prompts: list[Prompt] = []
        self._seen = self._kept = 0
        self._tokens_run, self._seconds_run = 0, 0.0
        self._done_before = self._tried = 0
        self._trials = settings.trials
        self._search_started: float | None = None
        self._steps = self._compared = self._methods = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._display.end()

    def prepared(self, samples: "Samples") -> None:
        """Say which prompts will be run, and which not."""
        size = min(self._settings.sizes)
        longer = samples.longer_than(size)
        self._prompts = [*longer.tuning, *longer.held_out]
        say(self._console, f"prompts  {_prompts(longer.tuning, samples.tuning, 'to tune on', size)}")
        held_out = _prompts(longer.held_out, samples.held_out, "to judge by", size)
        asked = self._settings.holdout
        if asked is not None and len(samples.held_out) < asked:
            held_out += f"; {asked} were asked for, and there are no other rows"
        say(self._console, f"held out {held_out}")
        if asked != 0 and not longer.held_out:
            say(
                self._console,
                "No other row can judge the result, so the prompts tuned on will have to; give more data, or tune on "
                "fewer (--samples).",
                style="yellow",
            )
        elif asked != 0 and len(longer.held_out) < FEWEST_TO_TELL:
            say(
                self._console,
                f"Fewer than {FEWEST_TO_TELL} held-out prompts cannot show a difference; {HOLD_OUT_MORE}",
                style="yellow",
            )
        if "accumulated" in METHODS[self._settings.method].needs:
            say(
                self._console,
                f"{self._settings.method} needs the attention of all queries, not only of the window's, "
                "so captures take longer",
            )
        self._display.begin("Capturing", len(self._prompts))

    def captured(self, prompt: "Prompt", seconds: float, error: str | None) -> None:
        """Advance by one prompt."""
        self._seen += 1
        if error is None:
            self._kept += 1
        else:
            self._say_left_out(prompt.id, error)
        if seconds > 0:
            self._tokens_run += len(prompt.input_ids)
            self._seconds_run += seconds
        self._display.update(self._seen, self._capture_note(prompt, seconds, left_out=error is not None))

    def _capture_note(self, prompt: "Prompt", seconds: float, *, left_out: bool) -> str:
        note = f"{len(prompt.input_ids):,} tokens"
        if left_out:
            note += ", left out"
        else:
            note += f" in {seconds:.1f} s" if seconds > 0 else ", found on disk"
        remaining = sum(len(later.input_ids) for later in self._prompts[self._seen :])
        if remaining and self._tokens_run:
            note += f", {_left(remaining * self._seconds_run / self._tokens_run)}"
        return note

    def left_out(self, sample: "DroppedSample") -> None:
        """Say why a prompt that was captured is not used after all."""
        self._say_left_out(sample.id, sample.reason)

    def _say_left_out(self, prompt: str, reason: str) -> None:
        say(self._console, f"{prompt} is left out: {reason}", style="yellow")

    def over_limit(self, limit_bytes: int) -> None:
        """Say what becomes of captures that take more than they should."""
        say(
            self._console,
            f"The captures of this run take more than the {size_text(limit_bytes)} of --capture-memory: all of them "
            "are kept while it lasts, and those of other runs are deleted.",
            style="yellow",
        )

    def searching(self, size: int, method: str, study: str, storage: str, done: int, trials: int) -> None:
        """Say where the trials are, and start counting them."""
        from clusterprof.profile.fields import without_credentials

        # A password in it is for the database, not for the screen.
        shown = without_credentials(storage)
        before = f", {counted(done, 'trial')} from before" if done else ""
        say(self._console, f"study    {study}{before} (watch it with `optuna-dashboard {shown}`)")
        self._tried = 0
        self._done_before, self._search_started = done, time.monotonic()
        self._trials = trials
        self._display.begin(f"Searching {method} at {size}", max(trials, done), done)

    def tried(self, trials: "Sequence[FrozenTrial]", best: "FrozenTrial | None") -> None:
        """Advance by the trials of a round."""
        for trial in trials:
            if trial.value is None:
                reason = trial.user_attrs.get("error", "no reason given")
                say(self._console, f"Trial {trial.number} failed: {reason}", style="yellow")
            else:
                self._tried += 1
        if not self._tried:
            return
        assert self._search_started is not None
        elapsed = time.monotonic() - self._search_started
        done = self._done_before + self._tried
        left = (self._trials - done) * elapsed / self._tried
        if self._settings.timeout is not None:
            left = min(left, max(0.0, self._settings.timeout - elapsed))
        notes = [_left(left)] if left > 0 else []
        if best is not None:
            point = f" at {parameters_text(best.params)}" if best.params else ""
            notes.append(f"best {self._settings.objective} {best.value:.4f}{point}")
        self._display.update(done, ", ".join(notes))

    def interrupting(self) -> None:
        """Say that Ctrl-C was heard."""
        say(
            self._console,
            "Interrupted: what is under way is finished first; Ctrl-C again drops it.",
            style="yellow",
        )

    def searching_per_layer(self, steps: int) -> None:
        """Start counting the steps of the search per layer."""
        self._steps = 0
        self._display.begin("Searching per layer", steps)

    def tried_per_layer(self) -> None:
        """Advance by one step."""
        self._steps += 1
        self._display.update(self._steps, "at most")

    def comparing(self, methods: int) -> None:
        """Start counting the methods of the table."""
        self._compared, self._methods = 0, methods
        self._display.begin("Comparing", methods)

    def compared(self, label: str) -> None:
        """Advance by one method; after the last one the console is free for the result."""
        self._compared += 1
        self._display.update(self._compared, label)
        if self._compared == self._methods:
            self._display.end()

    def interruption(self) -> str:
        """Return what Ctrl-C left behind when no trial was finished, and how to go on."""
        if self._search_started is not None:
            kept = "the captures and the finished trials are kept"
        elif self._kept:
            kept = f"{self._kept} of {len(self._prompts)} captures are finished and kept"
        else:
            return "Interrupted before a prompt was captured; run the same command again to start over."
        return f"Interrupted: {kept}; run the same command again to go on from there."


def _prompts(longer: Sequence["Prompt"], drawn: Sequence["Prompt"], purpose: str, size: int) -> str:
    text = f"{len(longer)} {purpose}"
    if longer:
        lengths = [len(prompt.input_ids) for prompt in longer]
        text += f", {' to '.join(f'{end:,}' for end in sorted({min(lengths), max(lengths)}))} tokens"
    cut = sum(prompt.tokens_cut > 0 for prompt in longer)
    if cut:
        text += f", {cut} of them cut to the model's context"
    fitting = len(drawn) - len(longer)
    return f"{text}; {fitting} more set aside, not longer than size {size}" if fitting else text


def _left(seconds: float) -> str:
    return f"about {duration_text(seconds)} left"


@contextmanager
def waiting(console: "Console", text: str) -> Iterator[Callable[[], None]]:
    """Show that something is going on: a spinner on a terminal, one line in a log.

    Yields
    ------
    callable
        Takes the spinner away before the context ends, for instance because output follows.
    """
    if not console.is_terminal:
        say(console, text)
        yield lambda: None
        return
    with console.status(text) as status:
        yield status.stop
