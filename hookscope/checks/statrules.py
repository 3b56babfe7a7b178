"""What the gate of `stats` looks for, in words, and from where on: its rules and limits, with their defaults.

A vocabulary only, so that `--help` can show it: it imports nothing that computes.

The default limits are from MobileNetV2 with trained weights over 104 crops of two photographs, and from 16 of
torchvision's classifiers with random ones over four. The least participation ratio of the trained one was 2.3 of 144
channels, the next 7.6 of 96. Behind its normalisations the mean was within 0.45 of 0 and the deviation between 0.11
and 1.6; without training batch normalisation does nothing, and deviations of 38 and of less than a thousandth are
found, as they should be. No unit of either was at a bound in more than 4 % of its values. The mean absolute
correlation was 0.46 at most, 0.15 in the middle.
"""

from __future__ import annotations

from hookscope.checks.findings import Rule
from hookscope.checks.rules import Limit

RULES = (
    Rule(
        "nonfinite",
        "error",
        "a value that passed is not finite",
        "What follows from it is not a number either, and neither is the gradient.",
        "Look where it began: a division by zero, a root or logarithm of nothing, half precision out of its range, "
        "weights that are broken already.",
    ),
    Rule(
        "dead",
        "warn",
        "a unit of a rectified layer was never above the threshold, in any picture, at any position",
        "It takes no part in any answer, gets no gradient from this data, and will not learn.",
        "Look for a learning rate that was too high, a large negative bias, or a batch norm shift that moved it out "
        "of reach; on data that is not the training data it may wait for what is not shown.",
    ),
    Rule(
        "constant",
        "warn",
        "a unit of a layer that is not rectified gave the same value for everything, though what it received changed",
        "What does not depend on the input carries nothing: the unit is no more than a bias.",
        "Look for weights of zero, a normalisation with a scale of zero, or saturation in half precision.",
    ),
    Rule(
        "saturated",
        "warn",
        "a unit of a bounded layer is at a bound almost always",
        "There its slope is next to nothing: no gradient passes, and small changes of the input are lost.",
        "Check the scale of what comes in: the initialisation, a missing normalisation, pictures that are not scaled "
        "as in training.",
    ),
    Rule(
        "norm-shift",
        "warn",
        "what a layer receives from a normalisation layer is far from mean 0 and deviation 1",
        "The normalisation's statistics are not those of this data, or its scale and shift have run away.",
        "Check that the pictures are prepared as in training, and that the running statistics were made from the "
        "same kind of data.",
    ),
    Rule(
        "concentrated",
        "warn",
        "few channels of a layer have almost all of its energy",
        "What comes after is led by these few; they rule rounding, quantisation and similarities too.",
        "Look at the channels named: outliers that a model makes on purpose (transformers do) are no fault; a single "
        "channel that ran away is.",
    ),
    Rule(
        "alike",
        "warn",
        "the channels of a layer say much the same",
        "As many channels as the layer has are not needed for what they say together.",
        "A narrower layer may do; check the initialisation, and whether the inputs are nearly constant.",
    ),
    Rule(
        "drift",
        "error",
        "a distribution is not what it was in the baseline",
        "The model meets other data than it did, or is another: what was known of its answers may not hold.",
        "Find the first place that drifted: at the model's own input it is the data or its preparation, later the "
        "weights. Where the change is meant, run again with --update-baseline.",
    ),
    Rule(
        "layers-changed",
        "error",
        "a layer was added, removed, or has another shape or status than in the baseline",
        "What is not in both cannot be compared, and old checkpoints may no longer fit.",
        "Where the change is meant, run again with --update-baseline.",
    ),
)

LIMITS = (
    # Of a hundred pictures with none, fewer than three in a hundred have one, with 95 % confidence.
    Limit("samples", "fewest pictures before a unit is called dead, constant or saturated", 100),
    Limit("dead-samples", "the same of a dead one", or_else="samples"),
    Limit("constant-samples", "the same of a constant one", or_else="samples"),
    Limit("saturated-samples", "the same of a saturated one", or_else="samples"),
    Limit("dead", "largest share of a layer's units that may be dead", 0.0),
    Limit("constant", "least deviation of a unit over all data, as a share of its root mean square", 1e-6),
    Limit("saturated", "largest share of a unit's values that may be at a bound", 0.95),
    Limit("norm-mean", "largest distance of the mean from 0 after a normalisation", 3.0),
    Limit("norm-deviation", "largest factor between the deviation and 1 after a normalisation", 10.0),
    Limit(
        "concentrated",
        "least participation ratio of the channels' energies, as a share of the channels",
        0.01,
    ),
    Limit("concentrated-ratio", "the least such ratio itself, 1 where one channel has it all", 1.5),
    Limit("alike", "largest mean absolute correlation of a layer's channels", 0.5),
    Limit("drift-psi", "largest population stability index against the baseline", 0.2),
    Limit("drift-shift", "largest difference of means, in deviations of the baseline", 0.25),
    # Three times the mean of a chi-squared of nine degrees is its 99.9th percentile.
    Limit("drift-noise", "how many times what two samples of that size differ by is added to both", 3.0),
)
