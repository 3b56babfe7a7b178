"""`make bench`: speed and memory as ratios within one run, beside the floor and the peers.

    python tests/bench.py [ROW...]      rows by name, all by default

Every ratio is the median over pairs of runs side by side, so that a machine whose speed drifts slows both. A row
fails (exit 1) where a ratio misses what it must reach; a peer that is not installed is left out and said so.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import bench_activations
import bench_monitor
import torch
import torchvision

warnings.filterwarnings("ignore")

PHOTOS = Path(__file__).parent.parent / "hookscope" / "assets" / "photos"
LAST = torch.channels_last


@dataclass(frozen=True)
class Line:
    """One figure: what is compared with what, the ratio, and what it must reach (`<=` or `>=` a limit)."""

    what: str
    ratio: float
    limit: float
    at_most: bool
    detail: str = ""

    @property
    def reached(self) -> bool:
        return self.ratio <= self.limit if self.at_most else self.ratio >= self.limit


@dataclass(frozen=True)
class Compared:
    """Seconds of one function, and how many times the base's seconds that is."""

    seconds: float
    ratio: float


def compared(rounds: int, base: Callable[[], object], *others: Callable[[], object]) -> list[Compared]:
    """Each function against the base, by the median over rounds of the ratio of two runs side by side.

    The machine's speed drifts: only what ran within the same second is comparable. Who goes first takes turns.
    """
    base()
    for other in others:
        other()
    results = []
    for other in others:
        pairs = []
        for number in range(rounds):
            if number % 2:
                base_s, other_s = seconds(base), seconds(other)
            else:
                other_s, base_s = seconds(other), seconds(base)
            pairs.append((base_s, other_s))
        ratio = statistics.median(other_s / base_s for base_s, other_s in pairs)
        results.append(Compared(statistics.median(other_s for _, other_s in pairs), ratio))
    return results


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def resnet50(*, channels_last: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None).eval()
    return model.to(memory_format=LAST) if channels_last else model


def pictures(count: int, *, channels_last: bool) -> torch.Tensor:
    x = torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return x.to(memory_format=LAST) if channels_last else x


def peers(model: torch.nn.Module, x: torch.Tensor, targets: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Grad-CAM of `layer4` by the libraries that are installed, each as its README does it."""
    found: dict[str, Callable[[], object]] = {}
    try:
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        wanted = [ClassifierOutputTarget(int(t)) for t in targets]

        def by_grad_cam() -> object:
            with GradCAM(model=model, target_layers=[model.layer4]) as cam:
                return cam(input_tensor=x, targets=wanted)

        found["grad-cam"] = by_grad_cam
    except ImportError:
        print("grad-cam is not installed: left out")
    try:
        from torchcam.methods import GradCAM as TorchCam

        def by_torchcam() -> object:
            with TorchCam(model, "layer4") as cam:
                scores = model(x)
                return cam(targets.tolist(), scores)

        found["torchcam"] = by_torchcam
    except ImportError:
        print("torchcam is not installed: left out")
    try:
        from captum.attr import LayerGradCam

        found["captum"] = lambda: LayerGradCam(model, model.layer4).attribute(
            x, targets, relu_attributions=True
        )
    except ImportError:
        print("captum is not installed: left out")
    return found


def gradcam_row(*, as_readme: bool) -> list[Line]:
    import hookscope

    x = pictures(16, channels_last=not as_readme)
    targets = torch.arange(16) * 7
    theirs = peers(resnet50(channels_last=not as_readme), x, targets)
    if as_readme:
        model = hookscope.load_model("resnet50", weights="none").module
        ours_x = x.to(memory_format=LAST)
    else:
        model, ours_x = resnet50(channels_last=True), x

    def bare() -> None:
        with torch.inference_mode():
            model(ours_x)

    def ours() -> None:
        hookscope.gradcam(model, ours_x, layers="layer4", targets=targets)

    (floor,) = compared(11, bare, ours)
    per_image = f"{floor.seconds / 16e-3:.1f} ms an image"
    lines = [] if as_readme else [Line("Grad-CAM / bare forward", floor.ratio, 1.10, True, per_image)]
    limits = {"grad-cam": 4.0, "torchcam": 1.4 if as_readme else 1.1, "captum": 1.4 if as_readme else 1.1}
    for name, found in zip(theirs, compared(7, ours, *theirs.values()), strict=True):
        took = f"{found.seconds / 16e-3:.1f} ms an image"
        lines.append(Line(f"{name} / Grad-CAM", found.ratio, limits[name], False, took))
    return lines


def saved_row() -> list[Line]:
    import hookscope

    model, x = resnet50(channels_last=True), pictures(8, channels_last=True)
    targets = torch.arange(8)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    saved: dict[int, float] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:  # the weights are there anyway
            saved[storage.data_ptr()] = storage.nbytes() / 2**20
        return tensor

    lines = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hookscope.gradcam(model, x, layers="layer4", targets=targets)
        lines.append(Line("MiB saved for backward", sum(saved.values()), 1.0, True))
        for name, run in peers(model, x, targets).items():
            saved.clear()
            run()
            lines.append(Line(f"MiB saved by {name}", sum(saved.values()), 100.0, False))
    return lines


def featuremaps_row() -> list[Line]:
    from hookscope.cli.app import main

    with tempfile.TemporaryDirectory() as folder, quiet():

        def ours() -> None:
            words = "featuremaps resnet50 {} --weights none --channels all -o {}/out --overwrite -q"
            main(words.format(PHOTOS / "cat.png", folder).split())

        ours()
        start = time.perf_counter()
        ours()
        ours_s = time.perf_counter() - start
    channels = sum(
        m.out_channels for m in resnet50(channels_last=False).modules() if isinstance(m, torch.nn.Conv2d)
    )
    plotted = 256
    theirs_s = matplotlib_subplots(plotted)
    ratio = (theirs_s / plotted) / (ours_s / channels)
    detail = (
        f"{channels} channels in {ours_s:.2f} s, loading included; {plotted} subplots in {theirs_s:.2f} s"
    )
    return [Line("subplots / feature maps, per channel", ratio, 50, False, detail)]


def matplotlib_subplots(count: int) -> float:
    """Seconds for one subplot a channel of `layer1.0.conv3`, drawn and saved."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    maps = torch.randn(count, 56, 56).numpy()
    start = time.perf_counter()
    figure, axes = pyplot.subplots(16, count // 16, figsize=(16, 16))
    for axis, values in zip(axes.flat, maps, strict=True):
        axis.imshow(values, cmap="viridis")
        axis.axis("off")
    with tempfile.TemporaryDirectory() as folder:
        figure.savefig(Path(folder) / "maps.png")
    pyplot.close(figure)
    return time.perf_counter() - start


def gradnorm_row() -> list[Line]:
    import hookscope

    model, x = resnet50(channels_last=True), pictures(8, channels_last=True)
    targets = torch.arange(8)

    def bare() -> None:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), targets).backward()

    def ours() -> None:
        hookscope.gradnorm(model, x, targets)

    (found,) = compared(11, bare, ours)
    return [Line("gradnorm / bare forward and backward", found.ratio, 1.25, True, f"{found.seconds:.2f} s")]


FIVE = ("gradcam", "gradcam++", "xgradcam", "hirescam", "layercam")


def five_row() -> list[Line]:
    import hookscope

    model, x = resnet50(channels_last=True), pictures(8, channels_last=True)

    def ours() -> None:
        hookscope.gradcam(model, x, layers="layer4", targets="top:5", methods=FIVE)

    (found,) = compared(11, lambda: bare(model, x), ours)
    return [Line("5 methods x top-5 / bare forward", found.ratio, 1.15, True, f"{found.seconds:.2f} s")]


def ablation_row() -> list[Line]:
    import hookscope

    model, x = resnet50(channels_last=True), pictures(1, channels_last=True)

    def ours() -> None:
        hookscope.gradcam(model, x, layers="layer4", targets=[7], methods="ablationcam")

    def theirs() -> None:
        from pytorch_grad_cam import AblationCAM

        by_grad_cam(AblationCAM, model, model.layer4, x, batch_size=32)

    if not installed("pytorch_grad_cam"):
        return []
    ours()
    with quiet():
        theirs_s = seconds(theirs)
    ours_s = statistics.median(seconds(ours) for _ in range(3))
    detail = f"{ours_s:.2f} s against {theirs_s:.0f} s"
    return [Line("grad-cam's ablationcam / ours", theirs_s / ours_s, 50, False, detail)]


def scorecam_row() -> list[Line]:
    import hookscope
    from hookscope.cam.choice import site_infos
    from hookscope.cam.perturbed import at_once

    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval().to(memory_format=LAST)
    x = pictures(1, channels_last=True)
    count = at_once(site_infos(hookscope.list_layers(model, x)), x)
    batch = x.expand(count, -1, -1, -1).contiguous(memory_format=LAST)

    def needed() -> None:
        for start in range(0, 512, count):
            bare(model, batch[: min(count, 512 - start)])

    def ours() -> None:
        hookscope.gradcam(model, x, layers="layer4", targets=[7], methods="scorecam")

    theirs: dict[str, Callable[[], object]] = {}
    if installed("pytorch_grad_cam"):
        from pytorch_grad_cam import ScoreCAM

        theirs["grad-cam"] = lambda: by_grad_cam(ScoreCAM, model, model.layer4, x)
    if installed("torchcam"):
        theirs["torchcam"] = lambda: scorecam_by_torchcam(model, x)
    (floor,) = compared(2, needed, ours)
    lines = [Line("scorecam / the forwards it needs", floor.ratio, 1.05, True, f"{floor.seconds:.1f} s")]
    for name, found in zip(theirs, compared(1, ours, *theirs.values()), strict=True):
        lines.append(Line(f"{name}'s scorecam / ours", found.ratio, 1.05, False, f"{found.seconds:.1f} s"))
    if "grad-cam" in theirs:
        ours_mib, theirs_mib = (peak_above_start(SCORE_CAM, who) for who in ("hookscope", "grad-cam"))
        detail = f"{ours_mib:.0f} MiB against {theirs_mib:.0f} MiB"
        lines.append(Line("scorecam's peak memory / grad-cam's", ours_mib / theirs_mib, 0.5, True, detail))
    return lines


def scorecam_by_torchcam(model: torch.nn.Module, x: torch.Tensor) -> object:
    from torchcam.methods import ScoreCAM

    with ScoreCAM(model, "layer4") as cam, torch.no_grad():
        return cam(7, model(x))


SCORE_CAM = """
import sys, torch, torchvision, warnings
warnings.filterwarnings("ignore")
import hookscope, hookscope.library
from pytorch_grad_cam import ScoreCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
def mib(): return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
model = torchvision.models.resnet18(weights=None).eval().to(memory_format=torch.channels_last)
x = torch.randn(1, 3, 224, 224).to(memory_format=torch.channels_last)
with torch.no_grad(): model(x)
start = mib()
if sys.argv[1] == "hookscope":
    hookscope.gradcam(model, x, layers="layer4", targets=[7], methods="scorecam")
else:
    with ScoreCAM(model=model, target_layers=[model.layer4]) as cam:
        cam(input_tensor=x, targets=[ClassifierOutputTarget(7)])
print(mib() - start)
"""


def peak_above_start(program: str, *words: str) -> float:
    (found,) = numbers([sys.executable, "-c", program, *words])
    return found


def eigencam_row() -> list[Line]:
    import hookscope
    from hookscope.cam.methods import eigencam

    if not installed("pytorch_grad_cam"):
        return []
    from pytorch_grad_cam import EigenCAM
    from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection

    model, x = resnet50(channels_last=True), pictures(8, channels_last=True)

    def ours() -> None:
        hookscope.gradcam(model, x, layers="layer2", methods="eigencam")

    def theirs() -> None:
        by_grad_cam(EigenCAM, model, model.layer2, x)

    (activation,) = hookscope.feature_maps(model, x, "layer2").values()
    plain = activation.contiguous().numpy()
    (whole,) = compared(3, ours, theirs)
    (alone,) = compared(3, lambda: eigencam(activation), lambda: get_2d_projection(plain))
    return [
        Line("grad-cam's eigencam / ours, the map alone", alone.ratio, 10, False, f"{alone.seconds:.2f} s"),
        Line("the same, forward pass included", whole.ratio, 10, False, f"{whole.seconds:.2f} s"),
    ]


def bf16_row() -> list[Line]:
    import hookscope

    if not half_precision_is_native():
        print("this processor does not compute in bfloat16: left out")
        return []
    exact, x = resnet50(channels_last=True), pictures(16, channels_last=True)
    rough, rough_x = resnet50(channels_last=True).bfloat16(), x.bfloat16()

    def in_bf16() -> None:
        hookscope.gradcam(rough, rough_x, layers="layer4", targets=[7])

    def in_float32() -> None:
        hookscope.gradcam(exact, x, layers="layer4", targets=[7])

    (found,) = compared(7, in_bf16, in_float32)
    return [Line("Grad-CAM in float32 / in bfloat16", found.ratio, 2.0, False, f"{found.seconds:.2f} s")]


def half_precision_is_native() -> bool:
    """Whether the processor has instructions for bfloat16; emulated, it is far slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def bare(model: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode():
        model(x)


def by_grad_cam(
    method: type, model: torch.nn.Module, layer: torch.nn.Module, x: torch.Tensor, **how: object
) -> object:
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    with method(model=model, target_layers=[layer]) as cam:
        for name, value in how.items():
            setattr(cam, name, value)
        return cam(input_tensor=x, targets=[ClassifierOutputTarget(7)] * len(x))


def installed(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        print(f"{name} is not installed: left out")
        return False
    return True


def help_row() -> list[Line]:
    commands = ["layers", "featuremaps", "gradcam", "gradnorm", "run", "demo", "models"]
    lines = [Line("s for --help", shell_seconds([sys.executable, "-m", "hookscope", "--help"]), 0.25, True)]
    for name in commands:
        took = shell_seconds([sys.executable, "-m", "hookscope", name, "--help"])
        lines.append(Line(f"s for {name} --help", took, 0.40, True))
    return lines


SCRIPT = """
import sys, torch, torchvision
from PIL import Image
from safetensors.torch import load_file
model = torchvision.models.mobilenet_v2()
model.load_state_dict(load_file(sys.argv[1]), strict=False)
weights = torchvision.models.MobileNet_V2_Weights.IMAGENET1K_V1
x = weights.transforms()(Image.open(sys.argv[2]).convert("RGB"))[None]
with torch.inference_mode():
    print(weights.meta["categories"][model.eval()(x).argmax()])
"""


def script_row() -> list[Line]:
    from hookscope.models.demo import WEIGHTS_FILE

    photo = str(PHOTOS / "cat.png")
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, "-c", SCRIPT, str(WEIGHTS_FILE), photo]
        ours = [
            sys.executable,
            "-m",
            "hookscope",
            "gradcam",
            "demo",
            photo,
            "-o",
            f"{folder}/out",
            "--overwrite",
        ]
        (found,) = compared(11, lambda: shell(script), lambda: shell(ours))
    detail = f"{found.seconds:.2f} s"
    return [Line("gradcam demo cat.png / ten-line script", found.ratio, 1.15, True, detail)]


LOOP = """
import sys, torch, torchvision, warnings
from pathlib import Path
from PIL import Image
warnings.filterwarnings("ignore")
folder, workers = sys.argv[1], int(sys.argv[2])
transform = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()
class Photos(torch.utils.data.Dataset):
    files = sorted(Path(folder).iterdir())
    def __len__(self): return len(self.files)
    def __getitem__(self, i): return transform(Image.open(self.files[i]).convert("RGB"))
model = torchvision.models.resnet50(weights=None).eval().to(memory_format=torch.channels_last)
loader = torch.utils.data.DataLoader(Photos(), batch_size=16, num_workers=workers)
import time
start = time.perf_counter()
with torch.inference_mode():
    for x in loader:
        model(x.to(memory_format=torch.channels_last))
print(len(Photos()) / (time.perf_counter() - start))
"""

OURS = """
import sys, time
from hookscope.cli.app import main
import hookscope.run as run
folder, workers, out = sys.argv[1:]
real, took = run._Run.execute, []
def timed(self):
    start = time.perf_counter()
    report = real(self)
    took.append(time.perf_counter() - start)
    return report
run._Run.execute = timed
main(["gradcam", "resnet50", folder, "--weights", "none", "--workers", workers, "--batch-size", "16",
      "-o", out, "--overwrite", "-q"])
import pathlib
count = len(list(pathlib.Path(folder).iterdir()))
# Not ru_maxrss: a child's begins at its parent's.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(count / took[0], int(peak.split()[1]) / 1024)
"""


def many_row() -> list[Line]:
    workers = os.cpu_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder) / "200", 200)
        make_photos(Path(folder) / "50", 50)
        rates, peaks = [], []
        for _ in range(3):
            (theirs,) = numbers([sys.executable, "-c", LOOP, f"{folder}/200", str(workers)])
            ours, big_mib = numbers(
                [sys.executable, "-c", OURS, f"{folder}/200", str(workers), f"{folder}/out"]
            )
            _, small_mib = numbers(
                [sys.executable, "-c", OURS, f"{folder}/50", str(workers), f"{folder}/out"]
            )
            rates.append((ours, theirs))
            peaks.append((big_mib, small_mib))
    ratio = statistics.median(ours / theirs for ours, theirs in rates)
    detail = ", ".join(f"{ours:.1f} against {theirs:.1f}" for ours, theirs in rates) + " pictures/s"
    big_mib, small_mib = (statistics.median(column) for column in zip(*peaks, strict=True))
    memory = f"{big_mib:.0f} MiB, {small_mib:.0f} MiB"
    return [
        Line("gradcam over 200 pictures / bare loop, pictures/s", ratio, 0.85, False, detail),
        Line("peak memory at 200 / at 50", big_mib / small_mib, 1.05, True, memory),
    ]


def make_photos(folder: Path, count: int) -> None:
    """JPEGs of 1000x800, parts of the bundled photos, so that they decode like photos."""
    from PIL import Image

    folder.mkdir()
    sources = [Image.open(path).convert("RGB").resize((1100, 900)) for path in sorted(PHOTOS.glob("*.png"))]
    for index in range(count):
        left, top = index % 100, index % 97
        photo = sources[index % len(sources)].crop((left, top, left + 1000, top + 800))
        photo.save(folder / f"{index:03}.jpg", quality=90)


def numbers(command: Sequence[str]) -> list[float]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return [float(word) for word in done.stdout.split()]


def shell(command: Sequence[str]) -> None:
    subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, env=environment()
    )


def shell_seconds(command: Sequence[str]) -> float:
    shell(command)
    return statistics.median(seconds(lambda: shell(command)) for _ in range(5))


def environment() -> dict[str, str]:
    root = str(Path(__file__).parent.parent)
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    # An installed package is compiled once; so must this be.
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


@contextmanager
def quiet():
    with open(os.devnull, "w") as nothing:
        kept = os.dup(2)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


ROWS: dict[str, Callable[[], list[Line]]] = {
    "gradcam": lambda: gradcam_row(as_readme=False),
    "gradcam-readme": lambda: gradcam_row(as_readme=True),
    "saved": saved_row,
    "featuremaps": featuremaps_row,
    "gradnorm": gradnorm_row,
    "help": help_row,
    "script": script_row,
    "many": many_row,
    "five": five_row,
    "ablationcam": ablation_row,
    "scorecam": scorecam_row,
    "eigencam": eigencam_row,
    "bf16": bf16_row,
    **bench_activations.ROWS,
    **bench_monitor.ROWS,
}


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        print(f"no row {unknown[0]!r}; rows: {', '.join(ROWS)}")
        return 2
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, peak so far {peak_mib():.0f} MiB")
    missed = 0
    for name in names or ROWS:
        for line in ROWS[name]():
            missed += not line.reached
            mark = "ok  " if line.reached else "MISS"
            bound = f"{'<=' if line.at_most else '>='} {line.limit:g}"
            print(f"{mark} {name:15} {line.what:50} {line.ratio:9.3f}  {bound:8} {line.detail}", flush=True)
    return int(missed > 0)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
