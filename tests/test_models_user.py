"""The user's own models: files, factories, instances, wrappers, exported programs."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from hookscope.errors import ModelError, UsageError
from hookscope.models import load_model

SOURCE = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Shape:
    width: int = 4

class Net(nn.Module):
    def __init__(self, num_classes=3, width=Shape().width):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.conv(x).mean((2, 3)))

def make(num_classes=3, *, width=4):
    print("building")
    return Net(num_classes, width)

class Zoo:
    @staticmethod
    def small():
        return Net(width=2)

def needs(depth): return Net()
def raises(): raise KeyError("weights")
def leaves(): raise SystemExit(2)
def nothing(): return None
def pair(): return Net(), "transform"
def parallel(): return nn.DataParallel(Net())
def compiled(): return torch.compile(Net())
def both(): return torch.compile(nn.DataParallel(Net()))
def scripted(): return nn.Sequential(torch.jit.trace(Net(), torch.zeros(1, 3, 8, 8)))
def grey(): return nn.Sequential(nn.Conv2d(1, 2, 3))
def late(): return nn.ModuleDict({"head": nn.Conv2d(64, 2, 1), "stem": nn.Conv2d(3, 64, 3)})
def five(): return nn.Sequential(nn.Conv2d(5, 2, 3))
def flat(): return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
net = Net()
number = 7
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mynet.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("name", ["make", "Net", "Zoo.small", "net"])
def test_factories_classes_attributes_and_instances(file, name):
    loaded = load_model(f"{file}:{name}")
    assert type(loaded.module).__name__ == "Net"
    assert not any(part.training for part in loaded.module.modules())
    assert not loaded.random_weights
    assert not loaded.channels_last
    assert loaded.parameters == sum(value.numel() for value in loaded.module.parameters())
    assert "values 0..1" in loaded.warnings[-1]


def test_model_arguments_reach_the_factory(file):
    loaded = load_model(f"{file}:make", model_args={"num_classes": 7, "width": 2})
    assert loaded.module.fc.weight.shape == (7, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "words", "hint"),
    [
        ("mkae", {}, "has no 'mkae'", "'make'"),
        ("Zoo.smal", {}, r"has no 'Zoo\.smal'", "'small'"),
        ("make", {"num_clases": 3}, "num_clases", "'num_classes'"),
        ("needs", {}, "depth", "--model-arg"),
        ("net", {"width": 3}, "is a module already", "function"),
    ],
    ids=["name", "attribute", "argument", "missing-argument", "instance"],
)
def test_usage_errors(file, name, arguments, words, hint):
    with pytest.raises(UsageError, match=words) as caught:
        load_model(f"{file}:{name}", model_args=arguments)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "raised KeyError: 'weights'"),
        ("leaves", "raised SystemExit: 2"),
        ("nothing", "made a NoneType"),
        ("pair", "made a tuple"),
        ("number", "is a int"),
    ],
)
def test_model_errors(file, name, words):
    with pytest.raises(ModelError, match=words) as caught:
        load_model(f"{file}:{name}")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("body", ["import not_there", "1 / 0", "def (", "raise SystemExit"])
def test_a_file_that_cannot_be_imported(tmp_path, body):
    path = tmp_path / "broken.py"
    path.write_text(body)
    with pytest.raises(ModelError, match=r"broken\.py' raised"):
        load_model(f"{path}:make")
    assert not any("user_broken" in name for name in sys.modules)


def test_a_missing_file(file):
    with pytest.raises(UsageError, match="there is no file") as caught:
        load_model(f"{file.parent / 'mynte.py'}:make")
    assert caught.value.hint == "did you mean 'mynet.py'?"


def test_a_file_without_a_name(file):
    with pytest.raises(UsageError, match="names no callable"):
        load_model(str(file))


def test_neighbours_are_importable_and_not_mixed_up(tmp_path):
    for width, name in enumerate(("first", "second"), 1):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "layers_of_mine.py").write_text(f"WIDTH = {width}\n")
        (folder / "model.py").write_text(
            "import layers_of_mine\nfrom torch import nn\n"
            "def make(): return nn.Conv2d(3, layers_of_mine.WIDTH, 1)\n"
        )
    path = list(sys.path)
    widths = [
        load_model(f"{tmp_path / name}/model.py:make").module.out_channels for name in ("first", "second")
    ]
    assert widths == [1, 2]
    assert sys.path == path
    assert "layers_of_mine" not in sys.modules


def test_a_package_in_the_working_directory(tmp_path, monkeypatch):
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    assert load_model("package_of_mine.nets:make").module.fc.out_features == 3
    with pytest.raises(UsageError, match=r"no module 'package_of_mine\.ntes'"):
        load_model("package_of_mine.ntes:make")
    for name in [name for name in sys.modules if name.startswith("package_of_mine")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", ["parallel", "compiled", "both"])
def test_wrappers_come_off_and_weights_still_fit(file, tmp_path, name):
    truth = load_model(f"{file}:make").module
    path = tmp_path / "weights.pth"
    torch.save(truth.state_dict(), path)
    loaded = load_model(f"{file}:{name}", weights=str(path))
    assert type(loaded.module).__name__ == "Net"
    assert torch.equal(loaded.module.fc.weight, truth.fc.weight)
    assert sum("taken off" in warning for warning in loaded.warnings) == (2 if name == "both" else 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_refused(file):
    with pytest.raises(ModelError, match="part '0' is TorchScript"):
        load_model(f"{file}:scripted")


@pytest.mark.parametrize(("name", "channels"), [("grey", 1), ("late", 3), ("five", 5), ("flat", 3)])
def test_channels_are_those_of_the_first_convolution(file, name, channels):
    loaded = load_model(f"{file}:{name}")
    assert loaded.preprocess.channels == loaded.input_size[0] == channels


def test_overrides_silence_the_warning(file):
    loaded = load_model(f"{file}:make", resize=16, crop=16, mean=(0.5,), std=(0.5,))
    assert loaded.warnings == ()
    assert loaded.input_size == (3, 16, 16)
    assert loaded.preprocess.mean == (0.5, 0.5, 0.5)


def test_a_checkpoint_with_other_classes_rebuilds_where_the_factory_can(file, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"model": load_model(f"{file}:make", model_args={"num_classes": 9}).module.state_dict()}, path)
    loaded = load_model(f"{file}:make", weights=str(path))
    assert loaded.module.fc.out_features == 9
    assert "the model was rebuilt with the checkpoint's 9 classes" in loaded.warnings
    with pytest.raises(ModelError, match=r"2 of another shape \(fc\.weight \(9, 4\) for \(3, 4\)"):
        load_model(f"{file}:net", weights=str(path))


def test_weights_by_name_are_torchvisions(file):
    with pytest.raises(UsageError, match="no weights 'IMAGENET1K_V1'"):
        load_model(f"{file}:make", weights="IMAGENET1K_V1")


# Modules handed over


def test_a_module_that_need_not_change_is_the_very_same():
    module = nn.Sequential(nn.Conv2d(3, 2, 1)).eval()
    assert load_model(module).module is module


@pytest.mark.parametrize("change", ["mode", "precision", "weights"])
def test_a_module_that_must_change_is_copied(change, tmp_path):
    module = nn.Sequential(nn.Conv2d(3, 2, 1)).train(change == "mode")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    path = tmp_path / "weights.pth"
    torch.save(nn.Sequential(nn.Conv2d(3, 2, 1)).state_dict(), path)
    options = {"mode": {}, "precision": {"precision": "bf16"}, "weights": {"weights": str(path)}}[change]
    loaded = load_model(module, **options)
    assert loaded.module is not module
    assert not loaded.module.training
    assert module.training is (change == "mode")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_module_that_cannot_be_copied_says_what_to_do():
    module = nn.Sequential(nn.Conv2d(3, 2, 1))
    module.kept = module[0].weight * 2
    with pytest.raises(ModelError, match="cannot be copied") as caught:
        load_model(module)
    assert "function" in caught.value.hint


def test_a_module_takes_no_arguments():
    with pytest.raises(UsageError, match="already made"):
        load_model(nn.Conv2d(3, 2, 1), model_args={"a": 1})


# Exported programs


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 10)).eval()
    exported = torch.export.export(
        module, (torch.rand(2, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim("b")},)
    )
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    torch.export.save(exported, path)
    return module, path


def test_an_exported_program_is_a_tree_on_which_hooks_fire(program):
    module, path = program
    loaded = load_model(str(path))
    seen = []
    loaded.module.get_submodule("0").register_forward_hook(lambda *args: seen.append(args[2].clone()))
    x = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(loaded.module(x), module(x))
    torch.testing.assert_close(seen, [module[0](x)])
    assert loaded.input_size == (1, 8, 8)
    assert not loaded.module.training


def test_an_exported_program_brings_its_weights(program):
    with pytest.raises(UsageError, match="its own weights"):
        load_model(str(program[1]), weights="none.pth")


@pytest.mark.parametrize(
    ("content", "words"), [(b"nothing", "no exported program"), (None, "cannot be read")], ids=["text", "cut"]
)
def test_an_exported_program_that_is_none(tmp_path, program, content, words):
    import zipfile

    path = tmp_path / "net.pt2"
    if content is not None:
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("net/archive_format", "pt2")
    with pytest.raises(ModelError, match=words):
        load_model(str(path))


def test_a_missing_exported_program(program):
    with pytest.raises(UsageError, match="there is no file") as caught:
        load_model(str(program[1].with_name("nte.pt2")))
    assert "'net.pt2'" in caught.value.hint


def test_timm_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match="timm is not installed") as caught:
        load_model("timm/resnet18")
    assert "pip install 'hookscope[timm]'" in caught.value.hint
