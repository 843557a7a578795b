"""What every model of this package with a training and a deploy structure shares."""
from typing import Any, Dict, Mapping

import torch

from timm_rep.layers import RePaMlp, RePaMlpDeploy, mlp_structure

__all__ = ['ReparameterizeMixin']

_MISMATCH = {
    'training':
        'the checkpoint holds the training structure ({key}), the model has the deploy structure: load it into a model '
        'created without reparameterized=True, then call its reparameterize().',
    'deploy':
        'the checkpoint holds the deploy structure ({key}), which cannot be unfolded, and the model has the training '
        'structure: create the model with reparameterized=True to load it.',
}


class ReparameterizeMixin:
    """Adds ``reparameterize()`` to a timm model whose layers have ``fuse()``, and keeps its two structures apart."""

    __jit_unused_properties__ = ('reparameterized', '_model_args')

    @property
    def reparameterized(self) -> bool:
        """Whether the model has the deploy structure."""
        kinds = {type(module) for module in self.modules()}
        return RePaMlpDeploy in kinds and RePaMlp not in kinds

    @torch.jit.ignore
    def reparameterize(self):
        """Fold the training structure into the deploy structure, in place; same function as in eval mode.

        Folds running statistics whatever the mode, in float64 (RePaFormer, eq. 4-7). On a folded model it does
        nothing. ``timm.utils.reparameterize_model(model)`` does the same to a copy.

        Returns:
            The model.

        Raises:
            ValueError: A BatchNorm has no running statistics; the model is as it was.
            OverflowError: A folded weight does not fit the dtype of the model; the model is as it was.
        """
        # timm's utility replaces layer after layer, and would leave a model half folded where one of them fails
        fused = [
            (parent, name, child.fuse())
            for parent in self.modules() for name, child in parent.named_children() if hasattr(child, 'fuse')
        ]
        for parent, name, layer in fused:
            setattr(parent, name, layer)
        return self

    # timm's save_for_hf() and push_to_hf_hub() write these into config.json, and create_model() builds from them: a
    # folded model must say that it is, also when timm's own utility, which sees only its layers, folded it.
    @property
    def _model_args(self) -> Dict[str, Any]:
        args = dict(self.__dict__.get('_created_with', {}))
        if self.reparameterized:
            args['reparameterized'] = True
        return args

    @_model_args.setter
    def _model_args(self, args: Mapping[str, Any]) -> None:
        self._created_with = dict(args)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # runs before any layer of this model has loaded anything, though perhaps after what a wrapper has beside it
        for name, module in self.named_modules(prefix=prefix.rstrip('.')):
            if isinstance(module, (RePaMlp, RePaMlpDeploy)):
                found = mlp_structure(state_dict, f'{name}.')
                if found is not None and found != module.structure:
                    key = next(k for k in state_dict if k.startswith(f'{name}.'))
                    raise RuntimeError(
                        f'Cannot load into {type(self).__name__}: ' + _MISMATCH[found].format(key=repr(key)))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
