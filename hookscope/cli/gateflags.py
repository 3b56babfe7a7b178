"""The flags of a gate, which every command that has one takes, and the options that they mean."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hookscope.checks.findings import SEVERITIES, Rule
from hookscope.checks.rules import Limit, assignments

if TYPE_CHECKING:
    from hookscope.cli.flags import LayerFlags
    from hookscope.cli.session import Shared
    from hookscope.tasks.gate import GateOptions

GATE = "Gate"
"""The panel of `--help` that they stand in."""


def fail_on_option(rules: Sequence[Rule]) -> Any:
    """The option --fail-on of a command with these rules, whose help names them."""
    names = ", ".join(rule.name for rule in rules)
    return typer.Option(
        metavar="error|warn|RULE,...", rich_help_panel=GATE, help=f"Which findings exit with 1. {names}."
    )


def limits_option(limits: Sequence[Limit]) -> Any:
    """The option --limits of a command with these limits, whose help names them."""
    names = ", ".join(limit.name for limit in limits)
    return typer.Option(
        metavar="[GLOB:]NAME=X",
        rich_help_panel=GATE,
        help=f"{names}; repeatable, a table in a configuration.",
    )


@dataclass(frozen=True)
class GateFlags:
    """What a command with a gate adds. Each says `fail_on` and `limits` again, with its own rules in their help."""

    fail_on: Annotated[str, fail_on_option(())] = "error"
    severity: Annotated[
        list[str],
        typer.Option(
            metavar="[GLOB:]RULE=LEVEL",
            rich_help_panel=GATE,
            help=f"{', '.join(SEVERITIES)}; repeatable, a table in a configuration.",
        ),
    ] = field(default_factory=list)
    limits: Annotated[list[str], limits_option(())] = field(default_factory=list)
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR", rich_help_panel=GATE, help="Fail on drift from an earlier run's figures."
        ),
    ] = None
    update_baseline: Annotated[
        bool,
        typer.Option(
            "--update-baseline", rich_help_panel=GATE, help="Write this run's figures to --baseline."
        ),
    ] = False

    def gate_options(self, shared: Shared, limits: Mapping[str, float] | None = None) -> GateOptions:
        """What the flags mean; `limits` are set by flags of their own, over those of --limits."""
        from hookscope.tasks.gate import GateOptions

        return GateOptions(
            fail_on=self.fail_on,
            severity=assignments(self.severity, "--severity"),
            limits={**assignments(self.limits, "--limits"), **(limits or {})},
            baseline=self.baseline,
            update_baseline=self.update_baseline,
            precision=shared.model.precision,
            layers=chosen_layers(shared.layers),
            # GitHub wants paths from the repository's root, wherever in it the step runs.
            root=Path(os.environ.get("GITHUB_WORKSPACE") or "."),
        )


def chosen_layers(flags: LayerFlags) -> str:
    """Which layers are chosen, in words, for a baseline."""
    chosen, without = ", ".join(flags.layer) or "**", ", ".join(flags.exclude)
    return f"{chosen} without {without}" if without else chosen
