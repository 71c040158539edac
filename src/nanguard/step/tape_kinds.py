"""What the tape knows of a function of torch: whether its calls are rows, and of which kind."""

from __future__ import annotations

from typing import Any

from nanguard import _compat_modes
from nanguard.step.tape import is_write, name_of, words

NO_ROW, ROW, DRAWS, MAKES, BACKWARD, WRITES, CUTS, CARRIES = 0, 1, 2, 4, 8, 16, 32, 64
"""What is known of a function: it is a row; it draws random numbers; it makes tensors on the default device; it writes
to its first argument; it gives the same values without their graph; what it writes to is carried to the next step."""

PROPERTIES = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))
"""Properties that give a tensor. ``grad`` is not among them: it is no part of the forward pass."""

_WITHOUT_ROW = words(
    "tensor as_tensor asarray from_numpy frombuffer from_dlpack load item tolist numpy size dim numel stride "
    "__len__ __bool__ __float__ __int__ __index__ __format__ __repr__ __hash__ __contains__ __deepcopy__ __reduce_ex__ "
    "register_hook register_post_accumulate_grad_hook element_size is_floating_point is_complex data_ptr storage "
    "untyped_storage storage_offset is_contiguous ndimension nelement get_device device _set_grad_enabled "
    "is_tensor is_storage result_type can_cast is_same_size is_shared share_memory_ record_stream equal "
    "allclose"
)
"""Functions that give no tensor, or one with data from outside, or belong to another part of the step."""

_DRAW = words(
    "rand randn randint randperm normal bernoulli multinomial poisson binomial rand_like randn_like randint_like "
    "normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_ dropout dropout_ dropout1d "
    "dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_alpha_dropout native_dropout rrelu "
    "rrelu_ gumbel_softmax scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu "
    "fractional_max_pool2d fractional_max_pool3d _standard_gamma _sample_dirichlet sample svd_lowrank pca_lowrank "
    "trunc_normal_ kaiming_normal_ kaiming_uniform_ xavier_normal_ xavier_uniform_"
)


def kind_of(func: Any) -> int:
    """The flags of a function."""
    name = name_of(func)
    if name in ("__get__", "__set__"):
        prop = getattr(getattr(func, "__self__", None), "__name__", "")
        is_row = prop in PROPERTIES or (name == "__set__" and prop == "requires_grad")
        return (ROW | (CUTS if (name, prop) == ("__get__", "data") else 0)) if is_row else NO_ROW
    if name in _WITHOUT_ROW:
        return NO_ROW
    if name == "backward":
        return BACKWARD
    makes = MAKES if _compat_modes.takes_default_device(func) else 0
    cuts = CUTS if name == "detach" else 0
    carries = CARRIES if name == "_amp_update_scale_" else 0  # else the scale of a step depends on all steps before it
    return ROW | makes | cuts | carries | (DRAWS if name in _DRAW else 0) | (WRITES if is_write(name) else 0)
