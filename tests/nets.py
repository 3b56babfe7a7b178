"""Small nets that break naive hooks, each for one reason, and a way to run a model with no op in place."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode


class InPlaceIgnored(nn.Module):
    """The result of an in-place activation is ignored: only its side effect counts."""

    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Linear(4, 5)

    def forward(self, x):
        y = self.conv(x)
        self.relu(y)
        return self.fc(y.mean((2, 3)))


class IdentityThenInPlace(nn.Module):
    """An identity's output is its input: writing to one writes to the other."""

    def __init__(self):
        super().__init__()
        self.conv, self.same, self.fc = nn.Conv2d(3, 4, 3), nn.Identity(), nn.Linear(4, 5)

    def forward(self, x):
        y = self.conv(x)
        z = self.same(y)
        z *= 2
        return self.fc((y + z).mean((2, 3)))


class ReluThrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 5)

    def forward(self, x):
        x = self.relu(self.a(x))
        x = self.relu(self.b(x))
        return self.fc(self.relu(self.c(x)).mean((2, 3)))


class Pair(NamedTuple):
    main: torch.Tensor
    aux: torch.Tensor


class _Nested(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(3, 4, 3)

    def forward(self, x):
        a = self.conv(x)
        b = a * 3
        if self.kind == "tuple":
            return a, (b, None)
        if self.kind == "dict":
            return OrderedDict(out=a, aux=b)
        if self.kind == "list":
            return [a, b]
        return Pair(a, b)


class NestedOutput(nn.Module):
    """A layer whose output is a tuple, a dict, a list or a named tuple."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner, self.relu, self.fc = (
            kind,
            _Nested(kind),
            nn.ReLU(inplace=True),
            nn.Linear(4, 5),
        )

    def forward(self, x):
        out = self.inner(x)
        if self.kind == "tuple":
            a, (b, _) = out
        elif self.kind == "dict":
            a, b = out["out"], out["aux"]
        else:
            a, b = out
        return self.fc((self.relu(a) + b).mean((2, 3)))


class Tied(nn.Module):
    """One convolution under two names, and one weight in two layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = self.first
        self.out, self.twin = nn.Linear(4, 4), nn.Linear(4, 4)
        self.twin.weight = self.out.weight

    def forward(self, x):
        y = self.second(torch.tanh(self.first(self.stem(x))))
        return self.twin(torch.tanh(self.out(y.mean((2, 3)))))


class NeverCalled(nn.Module):
    """`spare` is not used at all; of `bypassed` only the weight is."""

    def __init__(self):
        super().__init__()
        self.conv, self.spare, self.bypassed = nn.Conv2d(3, 4, 3), nn.Linear(2, 2), nn.Linear(4, 5)

    def forward(self, x):
        return F.linear(self.conv(x).mean((2, 3)), self.bypassed.weight)


class Tokens(nn.Module):
    """A linear layer on tokens returns a view, and an in-place op follows."""

    def __init__(self):
        super().__init__()
        self.patch, self.lin = nn.Conv2d(3, 6, 4, stride=4), nn.Linear(6, 8)
        self.act, self.fc = nn.ReLU(inplace=True), nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        return self.fc(self.act(self.lin(tokens)).mean(1))


class _Stash(nn.Module):
    def __init__(self, derived):
        super().__init__()
        self.c, self.derived, self.skip = nn.Conv2d(3, 4, 3), derived, None

    def forward(self, x):
        y = self.c(x)
        self.skip = y * 2 if self.derived else y
        return y


class Stashed(nn.Module):
    """A layer's output is also kept aside, and used from there: a path past the layer's return value."""

    derived = False

    def __init__(self):
        super().__init__()
        self.enc, self.fc = _Stash(self.derived), nn.Linear(4, 5)

    def forward(self, x):
        y = self.enc(x)
        return self.fc((torch.relu(y) + 3 * self.enc.skip).mean((2, 3)))


class DerivedStash(Stashed):
    """What is kept aside was made of the output before it was returned."""

    derived = True


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return {"out": y, "feat": y}


class TwiceReturned(nn.Module):
    """One tensor under two keys of an output."""

    def __init__(self):
        super().__init__()
        self.b, self.fc = _Twice(), nn.Linear(4, 5)

    def forward(self, x):
        y = self.b(x)
        return self.fc((torch.relu(y["out"]) + y["feat"] * 2).mean((2, 3)))


class _Permute(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 1)


class Permuted(nn.Module):
    """A layer returns a view of its input, which is used as well."""

    def __init__(self):
        super().__init__()
        self.conv, self.lin, self.permute, self.fc = (
            nn.Conv2d(3, 6, 4, 4),
            nn.Linear(6, 8),
            _Permute(),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        tokens = self.lin(self.conv(x).flatten(2).transpose(1, 2))
        return self.fc(torch.tanh(self.permute(tokens)).mean(2) + tokens.mean(1))


class ReadBefore(nn.Module):
    """An identity's input was read before: its gradient, which is the output's too, has a share from there."""

    def __init__(self):
        super().__init__()
        self.conv, self.same, self.fc = nn.Conv2d(3, 4, 3), nn.Identity(), nn.Linear(4, 5)

    def forward(self, x):
        y = self.conv(x)
        early = torch.tanh(y)
        return self.fc((self.same(y) + early).mean((2, 3)))


class _Table(nn.Module):
    """Returns a tensor of its own, a buffer or a plain attribute."""

    def __init__(self, buffer):
        super().__init__()
        values = torch.randn(1, 4, 1, 1)
        if buffer:
            self.register_buffer("values", values)
        else:
            self.values = values

    def forward(self, x):
        return self.values


class OwnTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.table, self.plain = nn.Conv2d(3, 4, 3), _Table(True), _Table(False)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        y = self.conv(x)
        return self.fc((y * self.table(y) * self.plain(y)).mean((2, 3)))


class TwoViews(nn.Module):
    """A layer returns a tensor and a view of it; the tensor is written to afterwards."""

    class Both(nn.Module):
        def forward(self, x):
            y = x * 1
            return y, y.flatten(1)

    def __init__(self):
        super().__init__()
        self.conv, self.both, self.fc = nn.Conv2d(3, 4, 3), self.Both(), nn.Linear(4, 5)

    def forward(self, x):
        a, b = self.both(self.conv(x))
        a.mul_(2)
        return self.fc(b.clone().view(a.shape).mean((2, 3)))


class LateView(nn.Module):
    """A layer returns a view of a tensor that is kept, and written to, elsewhere."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.kept = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), []
        self.late = _Late(self.kept)

    def forward(self, x):
        self.kept.clear()
        y = self.late(self.conv(x))
        self.kept[0].mul_(2)
        return self.fc(y.mean((2, 3)))


class _Late(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def forward(self, x):
        y = x * 1
        self.kept.append(y)
        return y.view_as(y)


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.inner, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, 5)

    def forward(self, x, depth=0):
        y = self.inner(self.conv(x) if depth == 0 else x)
        return self(torch.tanh(y), depth + 1) if depth < 2 else self.fc(y.mean((2, 3)))


class HalfInPlace(nn.Module):
    """An in-place layer is given a slice, and its result is dropped."""

    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Linear(4, 5)

    def forward(self, x):
        y = self.conv(x)
        self.relu(y[:, :2])
        return self.fc(y.mean((2, 3)))


class Raises(nn.Module):
    """Raises in the middle of a forward pass, when told to."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.error = None

    def forward(self, x):
        y = self.bn(self.conv(x))
        if self.error is not None:
            raise self.error
        return self.fc(y.mean((2, 3)))


class Dropping(nn.Module):
    """Dropout, batch norm and a buffer that every call counts in: what inspection must not change."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop, self.fc = (
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.Dropout(),
            nn.Linear(4, 5),
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        torch.rand(1)
        return self.fc(self.drop(torch.relu(self.bn(self.conv(x)))).mean((2, 3)))


AWKWARD = {
    "in-place-ignored": InPlaceIgnored,
    "identity-in-place": IdentityThenInPlace,
    "relu-thrice": ReluThrice,
    "tuple": lambda: NestedOutput("tuple"),
    "dict": lambda: NestedOutput("dict"),
    "list": lambda: NestedOutput("list"),
    "named-tuple": lambda: NestedOutput("named"),
    "tied": Tied,
    "never-called": NeverCalled,
    "tokens": Tokens,
    "dropping": Dropping,
}


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make().eval()


def picture(pictures=2, size=12, seed=1):
    return torch.randn(pictures, 3, size, size, generator=torch.Generator().manual_seed(seed))


class _OutOfPlace(TorchFunctionMode):
    """Calls `F.relu(x, inplace=True)` and `x += y` out of place; both are used by their result in torchvision."""

    _SWAPS = {  # noqa: RUF012
        torch.Tensor.__iadd__: torch.add,
        torch.Tensor.__imul__: torch.mul,
        torch.Tensor.add_: torch.add,
        torch.relu_: torch.relu,
    }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        return self._SWAPS.get(func, func)(*args, **kwargs)


@contextmanager
def out_of_place(model):
    """The model with every in-place op undone: a twin whose stored outputs nobody rewrites."""
    flags = [(module, module.inplace) for module in model.modules() if hasattr(module, "inplace")]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for module, _ in flags:
            module.inplace = False
        with _OutOfPlace():
            yield model
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, inplace in flags:
            module.inplace = inplace
