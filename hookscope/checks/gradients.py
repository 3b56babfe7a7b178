"""The rules of the gradient gate: what each looks for in a gradient report, and from where on it is a finding.

Pure: a report and settings in, cases out. It measures nothing, and knows neither flags nor formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hookscope.checks.findings import Case
from hookscope.checks.graddepth import outliers, trend
from hookscope.checks.graddrift import Compared, changed, drifted
from hookscope.checks.gradfigures import GradBaseline, figures_of
from hookscope.checks.gradrows import Row, broken, layer_rows, parameter_rows, places
from hookscope.checks.gradrules import LIMITS, RULES
from hookscope.checks.rules import Look, Place, Seen, Settings, run
from hookscope.errors import NothingMeasured
from hookscope.layers import ROOT, Status, all_names, modules_by_name
from hookscope.wording import counted, listed

if TYPE_CHECKING:
    from torch import nn

    from hookscope.gradreport import GradReport
    from hookscope.probes.finiteness import FirstNonFinite


def default_settings() -> Settings:
    """The gate's rules and limits with nothing set."""
    return Settings(RULES, LIMITS)


def run_rules(
    report: GradReport, settings: Settings, baseline: GradBaseline | None = None
) -> tuple[Case, ...]:
    """A case for every rule and each parameter, layer or the whole model that it concerns, in the order of `RULES`.

    Parameters come in model order, layers in execution order. The rules on drift are looked at only with a baseline,
    the limits of the total norm only where they are set.

    Raises:
        UsageError: a glob of the settings means no parameter and no layer of the report or the baseline.
    """
    known = (*places(report), *(baseline.figures.places() if baseline is not None else ()))
    settings.check(known)
    layers = tuple(layer_rows(report))
    rows = (*parameter_rows(report), *layers)
    looks: dict[str, Look] = {
        "nonfinite": partial(_nonfinite, report, rows),
        "none": partial(_none, report),
        "zero": partial(_zero, rows),
        "vanishing": partial(_vanishing, rows),
        "exploding": partial(_exploding, rows),
        "depth-trend": partial(trend, report),
        "outlier": partial(outliers, layers),
        "max-norm": partial(_total, report, "max-norm"),
        "min-norm": partial(_total, report, "min-norm"),
    }
    if baseline is not None:
        compared = Compared(figures_of(report), baseline.figures, {row.place.name: row.place for row in rows})
        looks["drift"] = partial(drifted, compared)
        looks["layers-changed"] = partial(changed, compared)
    return run(looks, settings)


def check_measured(report: GradReport, settings: Settings) -> None:
    """Nothing, where the report has a figure, and one for every limit that has to be set to count.

    Raises:
        NothingMeasured: it has none.
    """
    of_parameters = any(row.gradient is not None for row in report.parameters)
    if not of_parameters and not any(row.output_grad is not None for row in report.layers):
        raise NothingMeasured(
            "the loss has no gradient at any parameter or layer", "does it depend on the output?"
        )
    for rule in ("max-norm", "min-norm"):
        wanted = settings.limit(rule, Place()) is not None and settings.severity(rule, Place()) != "off"
        if wanted and not of_parameters:
            raise NothingMeasured(
                f"no parameter has a gradient, so there is no total norm for {rule}",
                "are all of them frozen, or is the loss made without them?",
            )


def places_in(model: nn.Module) -> tuple[Place, ...]:
    """All that a glob may mean, in a model that has not been run yet."""
    types = {name: type(module).__name__ for name, module in modules_by_name(model).items()}
    layers = [Place(first, first, types[first], others) for first, others in all_names(model).items()]
    parameters = [
        Place(name, layer, types.get(layer, ""))
        for name, _ in model.named_parameters(remove_duplicate=False)
        if (layer := name.rpartition(".")[0] or ROOT)
    ]
    return (*layers, *parameters)


def _nonfinite(report: GradReport, rows: Sequence[Row], settings: Settings) -> Iterator[Seen]:
    first = report.first_non_finite
    began = f"; it began at {first.site}, going {first.direction}" if first is not None else ""
    yield _finite_model(report, began)
    if first is not None:
        # Before all that follows from it, for those who are told of a few findings only.
        known = {row.place.name: row.place for row in rows}
        yield _began(known.get(str(first.site)) or Place(str(first.site), first.site.layer), first)
    for row in rows:
        if first is not None and row.place.name == str(first.site):
            continue
        if row.size is None:
            yield Seen(row.place, skipped=row.missing)
        elif broken(row.size):
            message = (
                f"{row.place.name}: {row.size.non_finite} of {counted(row.size.count, 'value')} of {row.words} "
                f"are not finite, and 0 may be{began}"
            )
            yield Seen(row.place, row.size.non_finite, 0.0, message)
        else:
            yield Seen(row.place, 0.0, 0.0)


def _finite_model(report: GradReport, began: str) -> Seen:
    for words, value in (("the loss", report.loss), ("the total gradient norm", report.total_norm)):
        if not math.isfinite(value):
            return Seen(Place(), value, math.nan, f"{words} is {value}, which is not finite{began}")
    return Seen(Place(), 0.0, 0.0)


def _began(place: Place, first: FirstNonFinite) -> Seen:
    blamed = f" ({listed(first.parameters)})" if first.parameters else ""
    message = (
        f"{place.name}: the first layer where something is not finite, going {first.direction}: "
        f"{first.non_finite} of {counted(first.count, 'value')}, and 0 may be; {first.why}{blamed}"
    )
    return Seen(place, first.non_finite, 0.0, message)


def _none(report: GradReport, settings: Settings) -> Iterator[Seen]:
    for row, found in zip(parameter_rows(report), report.parameters, strict=True):
        if found.gradient is not None:
            yield Seen(row.place)
        elif found.status == Status.NO_GRAD_PATH:
            message = f"{row.place.name}: no gradient, though it is trainable and its layer was called"
            yield Seen(row.place, message=message)
        else:
            yield Seen(row.place, skipped=row.missing)


def _zero(rows: Sequence[Row], settings: Settings) -> Iterator[Seen]:
    for row in rows:
        if row.size is None or row.size.count == 0 or broken(row.size):
            yield Seen(
                row.place, skipped="it has no values" if row.size and not row.size.count else row.unfit
            )
        elif row.size.norm == 0:
            message = (
                f"{row.place.name}: all of {counted(row.size.count, 'value')} of {row.words} are exactly 0"
            )
            yield Seen(row.place, 0.0, 0.0, message)
        else:
            yield Seen(row.place, row.size.rms, 0.0)


def _vanishing(rows: Sequence[Row], settings: Settings) -> Iterator[Seen]:
    return _by_rms(rows, "vanishing", "below", lambda rms, limit: rms < limit, settings)


def _exploding(rows: Sequence[Row], settings: Settings) -> Iterator[Seen]:
    return _by_rms(rows, "exploding", "above", lambda rms, limit: rms > limit, settings)


def _by_rms(
    rows: Sequence[Row], rule: str, words: str, bad: Callable[[float, float], bool], settings: Settings
) -> Iterator[Seen]:
    for row in rows:
        if row.rms is None:
            yield Seen(row.place, skipped=row.unfit)
            continue
        limit = settings.number(rule, row.place)
        said = f"{row.place.name}: the RMS of {row.words} is {row.rms:.6g}, {words} {limit:g}"
        yield Seen(row.place, row.rms, limit, said if bad(row.rms, limit) else "")


def _total(report: GradReport, rule: str, settings: Settings) -> Iterator[Seen]:
    limit = settings.limit(rule, Place())
    if limit is None:
        return
    if all(row.gradient is None for row in report.parameters):
        yield Seen(Place(), limit=limit, skipped="no parameter has a gradient")
        return
    value = report.total_norm
    # Written so that a norm that is not a number fails too.
    passed, words = (value <= limit, "above") if rule == "max-norm" else (value >= limit, "below")
    words = words if math.isfinite(value) else "not within"
    yield Seen(
        Place(), value, limit, "" if passed else f"total gradient norm {value:.6g} is {words} {limit:g}"
    )
