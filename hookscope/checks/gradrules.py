"""What the gradient gate looks for, in words, and from where on: its rules and limits, with their defaults.

A vocabulary only, so that `--help` can show it: it imports nothing that computes.

The default limits are from 19 of torchvision's classifiers with random weights and MobileNetV2 with trained ones, in
eval mode, on two photographs, with cross-entropy. In 15 of them the RMS of parameters' gradients lay between 2e-11 (a
squeeze-and-excitation of MaxViT) and 12, 1e-9 in ConvNeXt, whose layers start scaled down by a million. The other five
lose the signal (MNASNet, MobileNetV3, GoogLeNet, EfficientNet: down to 1e-31, as batch normalisation does nothing
before training) or blow it up (Inception v3: 4e10), and are found.
"""

from __future__ import annotations

from hookscope.checks.findings import Rule
from hookscope.checks.rules import Limit

DRIFT_METRICS = ("parameter", "output", "total", "loss")
"""What is compared with a baseline: norms of parameters' and of outputs' gradients, the total norm, the loss."""

RULES = (
    Rule(
        "nonfinite",
        "error",
        "a value or a gradient is not finite",
        "One step with such a gradient makes weights that are not numbers, and they never recover.",
        "Look where it began: a division by zero, a root or logarithm of nothing, half precision out of its range, "
        "weights that are broken already.",
    ),
    Rule(
        "none",
        "error",
        "a trainable parameter of a layer that was called has no gradient",
        "It takes part in the answer and will never be trained.",
        "Look for detach(), no_grad(), argmax or rounding after it, or an output that the loss leaves out; freeze it "
        "if it is not to be trained.",
    ),
    Rule(
        "zero",
        "warn",
        "a gradient is exactly zero everywhere",
        "The layer learns nothing from these pictures, and neither does what feeds it alone.",
        "Look for dead or saturated units, a mask, or weights of zero after it; where these start from zero on "
        "purpose, switch the rule off for the layer.",
    ),
    Rule(
        "vanishing",
        "warn",
        "the RMS of a gradient is very small",
        "Steps this small are lost in rounding or in the optimiser's epsilon: the layer stands still.",
        "Check the initialisation, the normalisation, saturated activations before the loss, and the loss's scale; "
        "a skip connection helps deep parts.",
    ),
    Rule(
        "exploding",
        "warn",
        "the RMS of a gradient is very large",
        "One step throws the weights, and then the loss, far off.",
        "Check the initialisation, the normalisation and the loss's scale (a sum instead of a mean); clip gradients.",
    ),
    Rule(
        "depth-trend",
        "warn",
        "the RMS of the outputs' gradients falls or grows steadily with depth",
        "The two ends of the model learn at speeds that differ by that much.",
        "Initialise for the activation in use, normalise between layers, or add skip connections.",
    ),
    Rule(
        "outlier",
        "warn",
        "the gradient at a layer's output is unlike that at its neighbours'",
        "What stands apart from the layers around it mostly has a scale of its own that nobody meant.",
        "Compare its weights, and factors before and after it, with those of its neighbours.",
    ),
    Rule(
        "max-norm",
        "error",
        "the total gradient norm is above the limit",
        "A training step would be that much larger than what was agreed on.",
        "See which layers' norms are largest; check the loss's scale and the weights.",
    ),
    Rule(
        "min-norm",
        "error",
        "the total gradient norm is below the limit",
        "A training step would do next to nothing.",
        "See whether the loss is saturated, and which layers have a gradient at all.",
    ),
    Rule(
        "drift",
        "error",
        "a figure is not what it was in the baseline",
        "The same pictures and loss gave another gradient: the model, its weights or its input is not what it was.",
        "Find the deepest layer that still agrees; where the change is meant, run again with --update-baseline.",
    ),
    Rule(
        "layers-changed",
        "error",
        "a layer or parameter was added, removed, or has another shape or status than in the baseline",
        "What is not in both cannot be compared, and old checkpoints may no longer fit.",
        "Where the change is meant, run again with --update-baseline.",
    ),
)

LIMITS = (
    Limit("vanishing", "least RMS of a gradient, of a parameter or at a layer's output", 1e-12),
    Limit("exploding", "largest RMS of a gradient, of a parameter or at a layer's output", 1e3),
    # 4.6 at most in the healthy ones, 7.0 at least in the others.
    Limit("depth-trend", "decades by which the RMS may change over the whole depth", 5.0, of_model=True),
    Limit("outlier", "decades between a layer's RMS and the median of its neighbours'", 3.0),
    Limit("max-norm", "largest total norm", of_model=True),
    Limit("min-norm", "least total norm", of_model=True),
    Limit("drift", "relative difference to the baseline, of every figure", 0.01),
    *(
        Limit(
            f"drift-{metric}",
            f"the same of a {metric}",
            of_model=metric in ("total", "loss"),
            or_else="drift",
        )
        for metric in DRIFT_METRICS
    ),
    Limit("drift-abs", "absolute difference to the baseline that never counts", 0.0),
    *(
        Limit(
            f"drift-{metric}-abs",
            f"the same of a {metric}",
            of_model=metric in ("total", "loss"),
            or_else="drift-abs",
        )
        for metric in DRIFT_METRICS
    ),
    Limit("drift-noise", "difference that never counts, as a share of the baseline's total norm", 1e-6),
)
