"""How a run went, told to a person and to the CI service: what was seen, what was odd, where the files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookscope.cli import ci, talk, verdicts
from hookscope.cli.flags import TalkFlags
from hookscope.wording import counted, listed

if TYPE_CHECKING:
    from hookscope.job import Job, Report
    from hookscope.output.manifest import Manifest


def tell(report: Report, job: Job, flags: TalkFlags) -> None:
    """Warnings, errors and findings on stderr; results, or the manifest as JSON, on stdout."""
    manifest = report.manifest
    errors = set(map(str, report.errors))
    for warning in () if flags.quiet else manifest.warnings:
        if warning not in errors:
            talk.complain("warning", warning)
    for error in report.errors:
        talk.complain("error", error.message, error.hint)
    for record in manifest.images:
        if record["status"] == "error":
            talk.complain("error", record["error"])
    verdicts.tell(
        report.findings, report.failing, quiet=flags.quiet, whole=str(job.out.path / "manifest.json")
    )
    if flags.as_json:
        talk.say_json(manifest)
    elif not flags.quiet:
        _tell_results(report, job, flags)
    # Last, so that a summary which cannot be written takes nothing away from what was found.
    for gate in report.gates:
        ci.tell(gate, report.summaries, results_on_stdout=flags.as_json)


def _tell_results(report: Report, job: Job, flags: TalkFlags) -> None:
    manifest = report.manifest
    if flags.dry_run:
        for pattern, names in manifest.patterns.items():
            talk.say(f"{pattern}: {', '.join(names) if flags.verbose else listed(names)}")
        pictures = counted(len(job.found.refs), "picture") if job.data is None else "batches of the data"
        layers = counted(len(manifest.layers), "layer") if manifest.layers else "layers as the model runs"
        talk.say(f"{pictures}, {layers}, to {job.out.path}; nothing was run")
        return
    for record in manifest.images:
        if record["status"] == "ok":
            talk.say(talk.top_line(record))
    for line in report.lines:
        talk.say(line)
    if flags.verbose:
        for record in manifest.artifacts:
            talk.say(str(job.out.path / record["path"]))
    _tell_odd(manifest.artifacts)
    if not flags.verbose and manifest.artifacts:
        talk.say(f"for instance {job.out.path / _first(manifest)['path']}")
    talk.say(f"{counted(len(manifest.artifacts), 'file')} in {job.out.path}")


def _first(manifest: Manifest) -> Mapping[str, Any]:
    """The first overlay in the order in which maps are made, one of a class before others.

    Without one a page for people, or the first file. Overlays of gradients are an extra, and the page says more.
    """
    overlays = [
        record
        for record in manifest.artifacts
        if record["part"] == "overlay" and record["kind"] != "gradnorm"
    ]
    pages = [record for record in manifest.artifacts if record["part"] == "summary"]
    pictures = [record["path"] for record in manifest.images]
    layers = [record["layer"] for record in manifest.layers]

    own = manifest.options.get("gradcam", manifest.options)
    own = own.get("flags", own)  # in a recipe the layers stand beside the flags

    def order(record: Mapping[str, Any]) -> tuple[Any, ...]:
        target = _asked_at(record.get("asked", ""), own.get("target", ()))
        place = (
            _place(record["layer"], layers),
            record["call"],
            _place(record["method"], own.get("method", ())),
        )
        return record["kind"] != "gradcam", pictures.index(record["image"]), target, place

    return min(overlays, key=order, default=[*pages, *manifest.artifacts][0])


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _asked_at(asked: str, targets: Sequence[str]) -> tuple[int, int]:
    """Where a target stands among those asked for: which of them, and of `top:K` which."""
    for place, text in enumerate(targets if asked else ()):
        if text == asked:
            return place, 0
        if text.startswith("top:") and asked.startswith("top") and asked[3:].isdecimal():
            return place, int(asked[3:])
    return -1, 0


def _tell_odd(artifacts: Sequence[Any]) -> None:
    counts: dict[str, int] = {}
    for record in artifacts:
        if record["status"] != "ok" and record["part"] == "heatmap":
            counts[record["status"]] = counts.get(record["status"], 0) + 1
    for status, count in sorted(counts.items()):
        talk.say(f"{counted(count, 'map')} {status}")
