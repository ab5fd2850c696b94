"""Hyperparameter sweeps for PyTorch models. `sweep --help` is the door; `load_model` opens what a sweep found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sweeper.data import DataInfo as DataInfo
    from sweeper.data import Splits as Splits
    from sweeper.training.checkpoint import load_model as load_model

__version__ = "0.1.0"
__all__ = ["DataInfo", "Splits", "__version__", "load_model"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import sweeper` costs no torch (2 s): a shell's completion and `sweep --help` need none.
    if name == "load_model":
        from sweeper.training.checkpoint import load_model

        return load_model
    if name in ("DataInfo", "Splits"):
        import sweeper.data

        return getattr(sweeper.data, name)
    raise AttributeError(f"module 'sweeper' has no attribute {name!r}")
