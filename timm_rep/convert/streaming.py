"""One forward pass of the calibration images, during which the FFNs of a model are replaced one by one."""
import contextlib
import threading
from functools import cached_property, partial
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple, cast

import torch
import torch.nn as nn

from timm_rep.layers import Affine

from .calibration import Share, TokenSampler, is_padded, watch_masks
from .ffn import Ffn, replace_module
from .fitting import CalibrationRows
from .residual import Residual, first_tensor, tokens_of


def _hook_stream(
        residual: Residual,
        module: nn.Module,
        record: Callable[[torch.Tensor], None],
) -> torch.utils.hooks.RemovableHandle:
    """Call a function with the residual stream, (tokens, channels), whenever it passes a module."""
    def record_value(value: Any) -> None:
        record(tokens_of(first_tensor(value), residual.channels_first))

    if residual.is_input:
        return module.register_forward_pre_hook(lambda _, args: record_value(args))
    return module.register_forward_hook(lambda _, args, output: record_value(output))


def _sampled(ffn: Ffn, u: torch.Tensor, sampler: TokenSampler, share: Share) -> CalibrationRows:
    """The sampled rows of the input of one call."""
    u = tokens_of(u, ffn.use_conv)
    return CalibrationRows(sampler.take(ffn.name, share, u), sampler.held_out(ffn.name, share, len(u)).to(u.device))


def _concatenated(parts: Sequence[CalibrationRows]) -> CalibrationRows:
    return CalibrationRows(torch.cat([part.inputs for part in parts]), torch.cat([part.held_out for part in parts]))


@torch.no_grad()
def record_original(
        model: nn.Module,
        ffns: Sequence[Ffn],
        shares: Sequence[Share],
        sampler: TokenSampler,
        with_inputs: bool = False,
) -> Tuple[Dict[str, torch.Tensor], Dict[str, CalibrationRows], torch.Tensor]:
    """Run the images through the original model, and record the sampled tokens in the order of the images.

    Returns:
        The residual stream after each FFN, ``s + scale * y``, (rows, out), for FFNs whose stream is known; the input of
        each FFN, if asked for; and for each class whether it is predicted, (num_classes,), all False if the model does
        not return logits.
    """
    totals: Dict[str, List[torch.Tensor]] = {}
    inputs: Dict[str, List[CalibrationRows]] = {}
    streams: Dict[str, torch.Tensor] = {}
    share: Share
    like = next(model.parameters())
    predicted = torch.zeros(getattr(model, 'num_classes', None) or 0, dtype=torch.bool, device=like.device)

    def record_features(ffn: Ffn, second: Affine, scale: torch.Tensor, g: torch.Tensor) -> None:
        g = sampler.take(ffn.name, share, tokens_of(g, ffn.use_conv)).to(scale)
        with torch.autocast(g.device.type, enabled=False):
            y = g @ second.weight.T + second.bias
        totals.setdefault(ffn.name, []).append(streams.pop(ffn.name).to(scale) + scale * y)

    def record_input(ffn: Ffn, u: torch.Tensor) -> None:
        inputs.setdefault(ffn.name, []).append(_sampled(ffn, u, sampler, share))

    def record_stream(name: str, stream: torch.Tensor) -> None:
        streams[name] = sampler.take(name, share, stream)

    def record_mask(ffn: Ffn, attended: Optional[torch.Tensor]) -> None:
        if attended is not None:
            sampler.attended[ffn.name, share.batch] = attended

    with contextlib.ExitStack() as hooks:
        for hook in watch_masks(model, ffns, record_mask) if any(is_padded(share.x) for share in shares) else ():
            hooks.enter_context(hook)
        for ffn in ffns:
            residual = sampler.probes[ffn.name].residual
            if residual is not None:
                scale = residual.scale.to(like.device, torch.promote_types(like.dtype, torch.float32))
                second = Affine(*(x.to(scale) for x in ffn.fc_out()))
                hooks.enter_context(_hook_stream(residual, residual.module, partial(record_stream, ffn.name)))
                hooks.enter_context(ffn.last.register_forward_pre_hook(
                    lambda _, args, ffn=ffn, second=second, scale=scale:
                    record_features(ffn, second, scale, args[0])))
            if with_inputs:
                hooks.enter_context(ffn.first.register_forward_pre_hook(
                    lambda _, args, ffn=ffn: record_input(ffn, args[0])))
        for share in shares:
            output = model(share.x)
            if isinstance(output, torch.Tensor) and output.ndim == 2 and output.shape[1] == len(predicted) > 1:
                predicted[output.argmax(1)] = True
    return (
        {name: torch.cat(parts) for name, parts in totals.items()},
        {name: _concatenated(parts) for name, parts in inputs.items()},
        predicted)


def _thread_state(device_type: str) -> Callable[[], ContextManager[None]]:
    """A context without gradients and with the autocast settings of this thread, which other threads do not inherit."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with torch.no_grad(), torch.autocast(device_type, dtype, enabled):
            yield

    return context


class _Cancelled(BaseException):
    """Ends the thread of a batch."""


class _FfnSlot(nn.Module):
    """Stands in for an FFN, and holds the batches that reach it until the FFN is converted."""

    def __init__(self, ffn: Ffn, on_input: Callable[['_FfnSlot', torch.Tensor], None]):
        super().__init__()
        self.ffn, self.on_input = ffn, on_input  # on_input() returns when the batch may go on
        self.converted: Optional[nn.Module] = None

    @cached_property
    def exact(self) -> nn.Module:
        """The FFN, as a map of u to y."""
        return self.ffn.exact()

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        if self.converted is None:
            self.on_input(self, u)
        return (self.converted or self.exact)(u)


class _BatchThread(threading.Thread):
    """Runs one batch through the model. One thread runs at a time: the main one waits for a batch to reach an FFN."""

    def __init__(self, run: Callable[[], Any], name: str):
        super().__init__(name=name, daemon=True)
        self.run_model = run
        self.inputs: Dict[str, List[CalibrationRows]] = {}
        self.streams: Dict[str, torch.Tensor] = {}
        self.waiting_at: Optional[_FfnSlot] = None
        self.finished, self.cancelled = False, False
        self.error: Optional[BaseException] = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self._go.acquire()
        try:
            if not self.cancelled:
                self.run_model()
        except _Cancelled:
            pass
        except BaseException as e:
            self.error = e
        finally:
            self.finished = True
            self._back.release()

    def proceed(self) -> None:
        """Called by the main thread: run to the next FFN that is not converted, or to the end."""
        if not self.is_alive():
            self.start()
        self._go.release()
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def wait(self, slot: _FfnSlot) -> None:
        """Called by this thread: hand over to the main thread until it proceeds."""
        self.waiting_at = slot
        self._back.release()
        self._go.acquire()
        self.waiting_at = None
        if self.cancelled:
            raise _Cancelled

    def cancel(self) -> None:
        """End the thread where it waits, and wait for its end."""
        self.cancelled = True
        if self.is_alive():
            self._go.release()
            self.join()


class ConvertingPass:
    """A forward pass in which all batches advance together: each waits at an FFN until the FFN is converted.

    A batch is a thread, so that any architecture can wait in the middle of its forward pass; its state is what the
    frames of ``forward()`` hold, about four activations. The input of an FFN comes from the converted ones before it.
    Used as a context manager, which after an error or interrupt restores the model and ends the threads.

    ::

        with ConvertingPass(model, ffns, shares, sampler) as converting:
            for ffn in ffns:  # in the order of execution
                rows, stream = converting.run_until(ffn)
                converting.convert(ffn, new_map)
    """

    def __init__(
            self,
            model: nn.Module,
            ffns: Sequence[Ffn],
            shares: Sequence[Share],
            sampler: TokenSampler,
    ):
        self.model, self.ffns, self.sampler = model, ffns, sampler
        context = _thread_state(next(model.parameters()).device.type)
        self._threads = [
            _BatchThread(partial(self._run, share, context), f'calibration batch {share.batch}')
            for share in shares]
        self._shares = dict(zip(self._threads, shares))
        self._slots: Dict[str, _FfnSlot] = {}
        self._placed: Dict[str, nn.Module] = {}
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> 'ConvertingPass':
        try:
            self._place_slots()
        except BaseException as e:
            self.__exit__(type(e))
            raise
        return self

    def _place_slots(self) -> None:
        for ffn in self.ffns:
            slot = _FfnSlot(ffn, self._on_input)
            self._slots[ffn.name] = slot
            self._put(ffn, ffn.around(slot))
        placed = {ffn.module: self._placed[ffn.name] for ffn in self.ffns}
        for ffn in self.ffns:
            residual = self.sampler.probes[ffn.name].residual
            if residual is not None:
                module = placed.get(residual.module, residual.module)
                self._hooks.enter_context(_hook_stream(residual, module, partial(self._record_stream, ffn.name)))

    def _put(self, ffn: Ffn, new: nn.Module) -> None:
        replace_module(self.model, self._placed.get(ffn.name, ffn.module), new)
        self._placed[ffn.name] = new

    def __exit__(self, error: Optional[type] = None, *_: Any) -> None:
        for thread in self._threads:
            thread.cancel()
        self._hooks.close()
        for ffn in self.ffns:
            if ffn.name in self._placed:
                self._put(ffn, ffn.module if error else ffn.around(self._slots[ffn.name].converted))

    def _run(self, share: Share, context: Callable[[], Any]) -> None:
        with context():
            self.model(share.x)

    def _record_stream(self, name: str, stream: torch.Tensor) -> None:
        thread = cast(_BatchThread, threading.current_thread())
        if self._slots[name].converted is None:
            thread.streams[name] = self.sampler.take(name, self._shares[thread], stream)

    def _on_input(self, slot: _FfnSlot, u: torch.Tensor) -> None:
        thread, name = cast(_BatchThread, threading.current_thread()), slot.ffn.name
        seen = thread.inputs.setdefault(name, [])
        seen.append(_sampled(slot.ffn, u, self.sampler, self._shares[thread]))
        # an FFN called several times per pass stays the original in all calls but the last
        if len(seen) == self.sampler.probes[name].calls:
            thread.wait(slot)

    def run_until(self, ffn: Ffn) -> Tuple[CalibrationRows, Optional[torch.Tensor]]:
        """Run all batches up to an FFN.

        Returns:
            For the sampled tokens, in the order of the batches: the inputs of the FFN, and the residual stream that the
            output is added to, (rows, out), None if it is not known.
        """
        for thread in self._threads:
            while not thread.finished and (thread.waiting_at is None or thread.waiting_at.converted is not None):
                thread.proceed()
        rows = _concatenated([x for thread in self._threads for x in thread.inputs.pop(ffn.name, [])])
        streams = [thread.streams.pop(ffn.name) for thread in self._threads if ffn.name in thread.streams]
        return rows, torch.cat(streams) if streams else None

    def convert(self, ffn: Ffn, converted: nn.Module) -> None:
        """Replace an FFN by a new map of u to y, with which all batches continue."""
        self._slots[ffn.name].converted = converted
