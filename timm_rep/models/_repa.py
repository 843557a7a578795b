"""Parts shared by the RePa models."""
from typing import Any, Dict, Optional

from timm_rep.convert import ReparameterizeMixin, use_repa_ffns


class RePaMixin(ReparameterizeMixin):
    """First base of a RePa model, before timm's model, whose FFNs it replaces by RePa FFNs."""

    def __init__(
            self,
            *,
            idle_ratio: float = 0.75,
            idle_schedule: str = 'constant',
            reparameterized: bool = False,
            bn_momentum: Optional[float] = 0.1,
            bn_eps: float = 1e-5,
            **kwargs: Any,
    ):
        """
        Args:
            idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1.
            idle_schedule: 'constant' or 'linear', see :func:`timm_rep.layers.idle_ratios`.
            reparameterized: Build the deploy structure, for checkpoints of a folded model.
            bn_momentum: Momentum of the BatchNorms of the FFNs; None for a cumulative average.
            bn_eps: Epsilon of the BatchNorms of the FFNs.
            kwargs: Arguments of timm's model.

        Raises:
            ValueError: An argument is out of range, or an FFN is not two linear layers with an activation.
        """
        super().__init__(**kwargs)
        use_repa_ffns(self, idle_ratio, idle_schedule, bn_momentum, bn_eps, reparameterized)


def features_of_stages(args: Dict[str, Any]) -> Dict[str, Any]:
    """Arguments of create_model with which ``features_only=True`` returns the features of every stage by default."""
    return {'out_indices': tuple(range(len(args['depths']))), **args}
