"""See inside PyTorch image models: feature maps, class-activation maps, gradient norms.

Public names are resolved on first use, so that importing the package loads neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookscope.features import open_features as open_features
    from hookscope.gradreport import GradReport as GradReport
    from hookscope.hooks import Needs as Needs
    from hookscope.hooks import Probe as Probe
    from hookscope.hooks import attached as attached
    from hookscope.hooks import preserved as preserved
    from hookscope.layers import LayerInfo as LayerInfo
    from hookscope.layers import Site as Site
    from hookscope.library import CamMap as CamMap
    from hookscope.library import extract as extract
    from hookscope.library import feature_maps as feature_maps
    from hookscope.library import gradcam as gradcam
    from hookscope.library import gradnorm as gradnorm
    from hookscope.library import stats as stats
    from hookscope.models import LoadedModel as LoadedModel
    from hookscope.models import load_model as load_model
    from hookscope.monitor.monitor import GradientMonitor as GradientMonitor
    from hookscope.runner import list_layers as list_layers
    from hookscope.statsreport import StatsReport as StatsReport

__version__ = "0.2.0"

_HOMES = {
    "CamMap": "library",
    "GradReport": "gradreport",
    "GradientMonitor": "monitor.monitor",
    "LayerInfo": "layers",
    "LoadedModel": "models",
    "Needs": "hooks",
    "Probe": "hooks",
    "Site": "layers",
    "StatsReport": "statsreport",
    "attached": "hooks",
    "extract": "library",
    "feature_maps": "library",
    "gradcam": "library",
    "gradnorm": "library",
    "list_layers": "runner",
    "load_model": "models",
    "open_features": "features",
    "preserved": "hooks",
    "stats": "library",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
