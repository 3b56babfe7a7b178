"""From maps as they were made to what is drawn: each once, and a sheet of a picture's maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hookscope.artifacts import Heat, Sheet
from hookscope.cam.plan import Made


def distinct(made: Iterable[Made]) -> Iterator[Made]:
    """Each map once: `top1` and the same class by its id are one."""
    seen: set[tuple[object, ...]] = set()
    for one in made:
        target = one.target
        what = (
            None
            if target is None
            else (target.index, target.against, target.box, target.missing and target.name)
        )
        own = target.name if target is not None and target.index is None else ""
        key = (one.image, one.site, one.method, what, own)
        if key not in seen:
            seen.add(key)
            yield one


def heat_of(made: Made, covers: tuple[float, float]) -> Heat:
    return Heat(
        kind="gradcam",
        image=made.image,
        site=made.site,
        method=made.method,
        values=made.values,
        minimum=made.minimum,
        maximum=made.maximum,
        status=made.status,
        target=made.target,
        signed=made.signed,
        covers=covers,
    )


def sheets(heats: Iterable[Heat]) -> Iterator[Sheet]:
    by_image: dict[int, list[Heat]] = {}
    for heat in heats:
        by_image.setdefault(heat.image, []).append(heat)
    for image, members in by_image.items():
        yield Sheet(image, tuple(members))
