"""The formulas: one function a method, named after it, from what the model gave to a raw, signed map.

Tensors in are (N, C, h, w) float32 and maps out (N, h, w), before the ReLU that `rectified` methods share. Knows no
model, hook or layer, and uses tensors' own methods at import, so that `--help` can list the methods without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gradcam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Channels weighted by their mean gradient: sum_k mean_ij(g_kij) A_k.

    Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization,
    ICCV 2017, eq. 1 and 2.
    """
    return _weighted(gradient.mean(dim=(2, 3), keepdim=True), activation)


def gradcam_plusplus(activation: Tensor, gradient: Tensor) -> Tensor:
    """Channels weighted by sum_ij alpha_kij ReLU(g_kij), alpha = 1 / (2 + S_k g_kij), S_k = sum_ab A_kab.

    Chattopadhay et al., Grad-CAM++: Generalized Gradient-based Visual Explanations for Deep Convolutional Networks,
    WACV 2018, eq. 19 divided by g^2: the same number, for gradients of any size and without an epsilon. 0 where the
    gradient or the denominator is 0.
    """
    positive = gradient.clamp(min=0)
    # In place: fresh tensors of this size cost more than the arithmetic.
    denominator = (activation.sum(dim=(2, 3), keepdim=True) * positive).add_(2)
    weights = (positive / denominator).sum(dim=(2, 3), keepdim=True)
    if not weights.isfinite().all():
        denominator.masked_fill_(denominator == 0, float("inf"))
        weights = (positive / denominator).sum(dim=(2, 3), keepdim=True)
    return _weighted(weights, activation)


def smoothgradcam_plusplus(activation: Tensor, moments: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Grad-CAM++ of the clean activation with g, g^2 and g^3 each replaced by its mean over noisy inputs.

    Omeiza et al., Smooth Grad-CAM++: An Enhanced Inference Level Visualization Technique for Deep Convolutional
    Neural Network Models, arXiv:1908.01224, 2019. alpha is 0 where its denominator is.

    Args:
        activation: of the clean input.
        moments: the means of g, g^2 and g^3, each (N, C, h, w) float64: cubes of small gradients leave float32.
    """
    first, second, third = moments
    total = activation.sum(dim=(2, 3), keepdim=True).to(third)
    denominator = 2 * second + total * third
    alpha = (second / denominator).where(denominator != 0, 0.0)
    weights = (alpha * first.clamp(min=0)).sum(dim=(2, 3), keepdim=True)
    return _weighted(weights.to(activation), activation)


def xgradcam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Channels weighted by their gradient averaged with the activation as weight: sum_ij g A / sum_ij A.

    Fu et al., Axiom-based Grad-CAM: Towards Accurate Visualization and Explanation of CNNs, BMVC 2020. 0 for a
    channel whose sum is 0.
    """
    total = activation.sum(dim=(2, 3), keepdim=True)
    weights = (gradient * activation).sum(dim=(2, 3), keepdim=True) / total
    return _weighted(weights.where(total != 0, 0.0), activation)


def hirescam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Every position weighted by its own gradient: sum_k g_kij A_kij.

    Draelos & Carin, Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks,
    arXiv:2011.08891, 2020.
    """
    return (gradient * activation).sum(dim=1)


def elementwise(activation: Tensor, gradient: Tensor) -> Tensor:
    """HiResCAM of what speaks for the class alone: sum_k ReLU(g_kij A_kij).

    Gildenblat and contributors, PyTorch library for CAM methods, GradCAMElementWise, 2021; there is no paper.
    """
    return (gradient * activation).clamp(min=0).sum(dim=1)


def layercam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Every position weighted by its own positive gradient: sum_k ReLU(g_kij) A_kij.

    Jiang et al., LayerCAM: Exploring Hierarchical Class Activation Maps for Localization, IEEE TIP 2021,
    eq. 4 to 6.
    """
    return gradient.clamp(min=0).mul_(activation).sum(dim=1)


def cam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Channels weighted by the class's row of the classifier: sum_k W_ck A_k.

    Zhou et al., Learning Deep Features for Discriminative Localization, CVPR 2016, eq. 2. Behind global average
    pooling and one Linear layer every g_kij is W_ck / (h w), so that their sum is W_ck. The caller checks that the
    head is such; of any other this is Grad-CAM times h w.
    """
    return _weighted(gradient.sum(dim=(2, 3), keepdim=True), activation)


def eigencam(activation: Tensor) -> Tensor:
    """The activation's first principal component, as `first_component` defines it, sign included.

    Muhammad & Yeasin, Eigen-CAM: Class Activation Map using Principal Components, IJCNN 2020. Of no class.
    """
    from hookscope.cam.component import first_component

    return first_component(activation)


def eigengradcam(activation: Tensor, gradient: Tensor) -> Tensor:
    """The first principal component of gradient times activation: EigenCAM of a class.

    Gildenblat and contributors, PyTorch library for CAM methods, EigenGradCAM, 2021; there is no paper.
    """
    return eigencam(gradient * activation)


def scorecam(activation: Tensor, scores: Tensor, channels: Tensor) -> Tensor:
    """Channels weighted by the softmax of the scores of the picture seen through each of them.

    Wang et al., Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks, CVPR Workshops
    2020. A softmax over channels does not change with the baseline score that the paper subtracts, so none is.
    A flat channel has no mask and no say: its weight is 0 and the others' sum to 1; all flat, the map is 0.

    Args:
        activation: (1, C, h, w).
        scores: (K,), the class's score of the picture times each of `masks`.
        channels: (K,) int64, which channel each score is of.
    """
    chosen = activation[:, channels]
    flat = _is_flat(chosen)[0]
    weights = scores.masked_fill(flat, float("-inf")).softmax(dim=0).masked_fill(flat, 0.0)
    return _weighted(weights.to(activation)[None, :, None, None], chosen)


def masks(activation: Tensor, channels: Tensor, size: tuple[int, int]) -> Tensor:
    """(K, 1, H, W) in [0, 1]: the chosen channels at the picture's size, each from its least to its greatest value.

    Upsampled first and scaled after, as in the paper, so that every mask reaches 0 and 1. A flat channel's is 0;
    that is judged before upsampling, whose rounding would otherwise be blown up to a pattern.

    Args:
        activation: (1, C, h, w).
        channels: (K,) int64.
        size: (H, W) of the picture.
    """
    chosen = activation[0, channels].unsqueeze(1)
    return _ranged(_resized(chosen, size)).masked_fill(_is_flat(chosen)[..., None, None], 0.0)


def most_varied(activation: Tensor, count: int) -> Tensor:
    """(K,) int64, K <= count: the channels of (1, C, h, w) that vary most over positions, most first.

    Of channels that vary alike the lower comes first.
    """
    variance = activation[0].flatten(1).var(dim=1, unbiased=False)
    return variance.argsort(stable=True, descending=True)[:count]


def ablationcam(activation: Tensor, score: Tensor, ablated: Tensor) -> Tensor:
    """Channels weighted by the share of the score that is lost without them: (y - y_k) / |y|.

    Desai & Ramaswamy, Ablation-CAM: Visual Explanations for Deep Convolutional Network via Gradient-free
    Localization, WACV 2020. The paper divides by y, which for a negative score would make a loss a gain: the map of
    the opposite. Divided by 1 where the score is 0.

    Args:
        activation: (1, C, h, w).
        score: (), y, of the unchanged activation.
        ablated: (C,), y_k, with channel k set to 0.
    """
    size = score.abs().where(score != 0, 1.0)
    return _weighted(((score - ablated) / size).to(activation)[None, :, None, None], activation)


def saliency(gradient: Tensor) -> Tensor:
    """How strongly the score depends on a pixel: max over colours of |g|.

    Simonyan et al., Deep Inside Convolutional Networks: Visualising Image Classification Models and Saliency Maps,
    ICLR Workshop 2014.

    Args:
        gradient: (N, 3, H, W), of the score to the model's input.
    """
    return gradient.abs().amax(dim=1)


def smoothgrad(gradient: Tensor) -> Tensor:
    """The saliency of the mean gradient of noisy inputs.

    Smilkov et al., SmoothGrad: removing noise by adding noise, arXiv:1706.03825, 2017.

    Args:
        gradient: (N, 3, H, W), the mean of the gradients at noisy copies of the input.
    """
    return saliency(gradient)


def fullgrad(terms: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
    """The input's and every bias's share in the score, each layer's between 0 and 1, summed over all.

    Srinivas & Fleuret, Full-Gradient Representation for Neural Network Visualization, NeurIPS 2019. psi is the
    absolute value, scaled per picture over all channels of a layer together, then bilinear upsampling. A layer whose
    terms are all alike adds 0.

    Args:
        terms: (N, C_l, h_l, w_l) each: gradient times input first, then gradient times bias of each layer.
        size: (H, W) of the picture.
    """
    shares = (_ranged(term.abs()).sum(dim=1, keepdim=True) for term in terms)
    maps = [_resized(share, size).squeeze(1) for share in shares]
    return sum(maps[1:], start=maps[0])


def _weighted(weights: Tensor, activation: Tensor) -> Tensor:
    """(N, h, w): the channels of (N, K, h, w) times (N, K, 1, 1), summed."""
    summed = weights[:, None, :, 0, 0] @ activation.flatten(2)
    return summed.reshape(len(activation), *activation.shape[2:])


def _is_flat(activation: Tensor) -> Tensor:
    """(N, C): whether a channel has the same value everywhere."""
    return activation.amax(dim=(2, 3)) == activation.amin(dim=(2, 3))


def _ranged(values: Tensor) -> Tensor:
    """Each sample's values from its least (0) to its greatest (1); 0 where they are all alike."""
    low = values.amin(dim=(1, 2, 3), keepdim=True)
    extent = values.amax(dim=(1, 2, 3), keepdim=True) - low
    return (values - low) / extent.where(extent != 0, 1.0)


def _resized(maps: Tensor, size: tuple[int, int]) -> Tensor:
    from torch.nn.functional import interpolate

    return interpolate(maps, size=size, mode="bilinear", align_corners=False)
