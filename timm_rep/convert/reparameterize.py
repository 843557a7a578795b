"""What every model of this package with a training and a deploy structure shares."""
from typing import Any, Dict, Mapping

import torch

from timm_rep.layers import foldable_layers

__all__ = ['ReparameterizeMixin']

# (structure of the checkpoint, structure of the model)
_MISMATCH = {
    ('training', 'deploy'):
        'the checkpoint holds the training structure ({key}), the model has the deploy structure: load it into a model '
        'created without reparameterized=True, then call its reparameterize().',
    ('branches', 'deploy'):
        'the checkpoint holds the branches of the search or CSLA structure ({key}), the model has the deploy '
        "structure: load it into a model created with structure='search', then call its reparameterize().",
    ('deploy', 'training'):
        'the checkpoint holds the deploy structure ({key}), which cannot be unfolded, and the model has the training '
        'structure: create the model with reparameterized=True to load it.',
    ('branches', 'training'):
        'the checkpoint holds the branches of the search or CSLA structure ({key}), the model has the target '
        "structure: load it into a model created with structure='search'; a target model takes only the scales, "
        'timm_rep.Scales.from_model(search_model).',
    ('training', 'branches'):
        'the checkpoint holds the target structure ({key}), the model has the branches of the search or CSLA '
        "structure: load it into a model created with structure='target'.",
}
_MISMATCH['deploy', 'branches'] = _MISMATCH['deploy', 'training']


class ReparameterizeMixin:
    """Adds ``reparameterize()`` to a timm model whose layers have ``fuse()``, and keeps its structures apart."""

    __jit_unused_properties__ = ('reparameterized', '_model_args')
    _registered = True  # whether create_model() takes reparameterized=True

    @property
    def reparameterized(self) -> bool:
        """Whether the model has the deploy structure."""
        return {layer.structure for _, layer in foldable_layers(self)} == {'deploy'}

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
        if self._registered and self.reparameterized:
            args['reparameterized'] = True
        return args

    @_model_args.setter
    def _model_args(self, args: Mapping[str, Any]) -> None:
        # what it started from is not part of what it is
        self._created_with = {name: value for name, value in args.items() if name != 'weight_select'}

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # runs before any layer of this model has loaded anything, though perhaps after what a wrapper has beside it
        for name, layer in foldable_layers(self, prefix.rstrip('.')):
            found = layer.structure_in(state_dict, f'{name}.')
            if found is not None and found != layer.structure:
                key = next(k for k in state_dict if k.startswith(f'{name}.'))
                raise RuntimeError(
                    f'Cannot load into {type(self).__name__}: '
                    + _MISMATCH[found, layer.structure].format(key=repr(key)))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
