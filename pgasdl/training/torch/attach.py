"""``pgasdl.torch.attach``: a training loop's gradients, exchanged while backward computes the next.

CaffeGPI's pipeline: a layer's exchange starts when backward has its gradient, and is waited for
just before the layer is next used. The optimizer's step of a layer is made there, too.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import numpy.typing as npt
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pgasdl.context import Context
from pgasdl.errors import ConfigError, PlanError
from pgasdl.group import Group
from pgasdl.training.exchange import GradientExchange
from pgasdl.training.torch.forward import ForwardHooks
from pgasdl.training.torch.layers import Layer, State, find_layers, require_in
from pgasdl.training.torch.replicate import broadcast
from pgasdl.training.torch.steps import PartialStep, steps_by_parameter


class Attachment:
    """A model and its optimizer, bound to an exchange: made by :func:`attach`.

    Attributes
    ----------
    model : nn.Module
        The model.
    optimizer : Optimizer
        Its optimizer.
    exchange : GradientExchange
        The exchange of its gradients; its layers are the modules with parameters of their own.
    deferred : bool
        Each layer's step is made before the layer is next used; False: all in
        ``optimizer.step()``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        context: Context,
        group: Group,
        deferred: bool,
        timeout: float | None,
        options: dict[str, Any],
    ) -> None:
        self.model, self.optimizer, self.deferred = model, optimizer, deferred
        self._layers = find_layers(model, optimizer)
        self._layer_of = {each: layer for layer in self._layers for each in layer.parameters}
        self.exchange = GradientExchange(
            context,
            [((layer.length,), layer.dtype) for layer in self._layers],
            group=group,
            timeout=timeout,
            **options,
        )
        try:
            broadcast(model, context, group, timeout)
        except BaseException:
            self.exchange.close(finish=False)
            raise
        for layer in self._layers:
            where = self.exchange.layers[layer.index].at
            layer.place(self.exchange.gradients.torch(layer.dtype, where, layer.length))
        self._exchanging = True
        self._step = PartialStep(optimizer)
        self._eager: list[Layer] = []
        self._hooks: list[RemovableHandle] = []
        self._forward = ForwardHooks(model, self._layers, self._take)
        self._hook()

    def _hook(self) -> None:
        for layer in self._layers:
            for number, parameter in enumerate(layer.parameters):
                parameter._pgasdl_attached = True  # type: ignore[attr-defined]
                coming = partial(self._require_local, layer, number)
                arrived = partial(self._arrived, layer, number)
                self._hooks += (
                    parameter.register_hook(coming),  # type: ignore[no-untyped-call]
                    parameter.register_post_accumulate_grad_hook(arrived),  # type: ignore[no-untyped-call]
                )

        # A copy of model or optimizer has these, too, and is not attached.
        def before_state(*_: Any) -> None:
            self.synchronize()

        def zero_grad(owner: Any, set_to_none: bool = True) -> None:
            if owner is self.model or owner is self.optimizer:
                self.zero_grad(set_to_none)
            else:
                type(owner).zero_grad(owner, set_to_none)

        def step(owner: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if owner is self.optimizer:
                return self._optimizer_step(closure)
            return type(owner).step(owner, closure)

        for each in (self.model, self.optimizer):
            each.zero_grad = types.MethodType(zero_grad, each)  # type: ignore[method-assign]
            self._hooks.append(each.register_state_dict_pre_hook(before_state))
            self._hooks.append(each.register_load_state_dict_pre_hook(before_state))
        # A scheduler wraps a step that it has not wrapped yet, by the method's function.
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.optimizer.step = types.MethodType(step, self.optimizer)  # type: ignore[method-assign]

    # --- what PyTorch calls

    def _require_local(self, layer: Layer, number: int, _: Tensor) -> None:
        """Refuse a gradient before it is added to memory that is not this rank's to change."""
        if layer.step is None and layer.state is State.LOCAL:
            return
        name = layer.names[number]
        if layer.step is not None:
            raise PlanError(
                f"parameter {name} was used before its last step was made, as no module that holds "
                "it was called: call synchronize() before such a use"
            )
        raise PlanError(
            f"parameter {name} gets another gradient while its last one is {layer.state.value}: "
            "put every backward but the last before a step into no_sync()"
        )

    def _arrived(self, layer: Layer, number: int, parameter: Tensor) -> None:
        """Backward has a parameter's gradient; with its layer's last one the exchange starts."""
        view = layer.views[number]
        if parameter.grad is not view:  # the program has put another one there
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        layer.mark(number)
        if not self._exchanging:
            return
        layer.arrived.add(number)
        if len(layer.arrived) == len(layer.parameters):
            self._begin(layer)

    def _optimizer_step(self, closure: Callable[[], Any] | None) -> None:
        if closure is not None:
            raise ConfigError("step(closure) is not possible: call backward, then step()")
        require_in(self._layer_of, self.optimizer)
        self._eager += self._forward.learn()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
        if not self.deferred:
            self._step_at_once()
            return
        settings = self._step.settings()
        for layer in self._layers:
            self._take(layer)  # if the last forward did not use it
            if layer.state is State.LOCAL:
                self._begin(layer)
            layer.step = settings
        for layer in self._eager:
            self._take(layer)

    def _step_at_once(self) -> None:
        self.wait()
        used = {each for layer in self._layers for each in layer.used()}
        unused = {each: each.grad for each in self._layer_of if each not in used}
        for each in unused:
            each.grad = None
        self._step.all()
        for each, gradient in unused.items():
            each.grad = gradient
        for layer in self._layers:
            layer.state = State.LOCAL

    # --- one layer

    def _begin(self, layer: Layer) -> None:
        self.exchange.ready(layer.index)
        layer.state = State.EXCHANGING
        layer.version = layer.gradient._version
        layer.arrived.clear()

    def _average(self, layer: Layer) -> None:
        if layer.state is State.EXCHANGING:
            if layer.gradient._version != layer.version:  # the exchange's own writes do not count
                raise PlanError(
                    f"the gradient of one of {', '.join(layer.names)} was changed while it was "
                    "exchanged: call wait() after backward, before you clip or scale"
                )
            self.exchange.wait(layer.index)
            layer.state = State.AVERAGED

    def _take(self, layer: Layer) -> None:
        """Make the step that the layer still has to make."""
        if layer.step is None:
            return
        self._average(layer)
        used = layer.used()
        if used:
            self._step.of(used, layer.step)
        layer.step = None
        layer.state = State.LOCAL
        if layer.zero:
            layer.gradient.zero_()
            layer.zero = False

    # --- what programs call

    def wait(self) -> None:
        """Wait until every gradient is the mean of all ranks'; then ``p.grad`` may be used.

        Between backward and ``optimizer.step()``, on every rank: before anything else uses
        gradients, such as ``GradScaler.unscale_`` and ``step``, or clipping by value. An earlier
        change is noticed, but not that of ``unscale_``, which PyTorch does not count.

        Raises
        ------
        Timeout, PeerLost, MismatchError, ClosedError
        """
        for layer in self._layers:
            self._take(layer)  # if the last forward did not use it
            if layer.state is State.LOCAL:
                self._begin(layer)
        for layer in self._layers:
            self._average(layer)

    def synchronize(self) -> None:
        """Make every step that is due: the parameters are those after ``optimizer.step()``.

        Not needed before the model is called, nor before ``state_dict``, which do it themselves.

        Raises
        ------
        Timeout, PeerLost, MismatchError, ClosedError
        """
        for layer in self._layers:
            self._take(layer)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients in a ``with`` block: for every backward but the last of a step."""
        before, self._exchanging = self._exchanging, False
        try:
            yield
        finally:
            self._exchanging = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the mean gradients by the norm of all of them; waits for them.

        Parameters
        ----------
        max_norm, norm_type : float
            As for :func:`torch.nn.utils.clip_grad_norm_`.

        Returns
        -------
        Tensor
            The norm before, the same on every rank.
        """
        self.wait()
        return nn.utils.clip_grad_norm_(list(self._layer_of), max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, those of a step that is due after that step.

        It takes the place of the model's and the optimizer's ``zero_grad``. Gradients stay where
        they are, whatever ``set_to_none`` says.
        """
        if any(each.state is State.EXCHANGING and each.step is None for each in self._layers):
            self.wait()  # for a step that the program leaves out, as its peers do
        for layer in self._layers:
            if layer.step is not None:
                layer.zero = True
                continue
            layer.gradient.zero_()
            layer.arrived.clear()
            layer.state = State.LOCAL

    def detach(self) -> None:
        """Make every step that is due, and give model and optimizer back as they were. Idempotent.

        Gradients are set to None.
        """
        try:
            self.synchronize()
        finally:
            self._unhook()
            self.exchange.close()

    def _unhook(self) -> None:
        if not self._layer_of:
            return
        self._forward.remove()
        for hook in self._hooks:
            hook.remove()
        for parameter in self._layer_of:
            del parameter._pgasdl_attached  # type: ignore[attr-defined]
            parameter.grad = None
        del self.model.zero_grad, self.optimizer.zero_grad
        self._step.restore()
        self._layer_of, self._layers = {}, []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.detach()
        else:  # steps that are due are not made
            self._unhook()
            self.exchange.close(finish=False)

    def describe(self) -> str:
        """Describe layers, plan and memory, for a log."""
        return self.exchange.describe()


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    context: Context,
    group: Group | None = None,
    deferred: bool | None = None,
    plan: str | None = None,
    bucket_bytes: int = 0,
    wire: npt.DTypeLike | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Attachment:
    """Average a model's gradients over all ranks, while backward runs. Collective.

    The loop stays as it is: ``loss.backward()``, ``optimizer.step()``, ``optimizer.zero_grad()``.
    Every rank makes the same number of steps.

    Parameters
    ----------
    model : nn.Module
        On the host. All ranks get rank 0's parameters and buffers.
    optimizer : Optimizer
        Of parameters of the model.
    context : Context
        The context of this rank.
    group : Group, optional
        None: all ranks.
    deferred : bool, optional
        Make each layer's step just before the layer is next used, so that no rank waits for all
        layers. None: if the optimizer is one of PyTorch's own that updates each parameter by
        itself (all but LBFGS); True: you know that yours does. False: ``step()`` waits for all.
    plan, bucket_bytes, wire, timeout, **options
        As for :class:`pgasdl.GradientExchange`.

    Returns
    -------
    Attachment
        For clipping, accumulation, and the end.

    Raises
    ------
    ConfigError
        The optimizer has parameters that are not the model's, or one is attached already.
    BufferRefused
        A parameter that is not in host memory, has sparse gradients, or a dtype that cannot be
        reduced; names it.
    MismatchError
        Ranks disagree on the model.

    Notes
    -----
    Gradients lie in a segment: ``p.grad`` is a view of it. Parameters that backward did not reach
    on any rank are not updated. Buffers, such as BatchNorm's, stay each rank's own. Until
    :meth:`Attachment.wait` returns, gradients belong to the exchange. With deferred steps, read a
    parameter yourself only after :meth:`Attachment.synchronize`; a hook of the optimizer's step
    runs once for each layer. ``torch.compile`` leaves its graph before each layer. CaffeGPI,
    section 3.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError("DistributedDataParallel averages already: attach to model.module")
    return Attachment(
        model,
        optimizer,
        context,
        group or context.world,
        steps_by_parameter(optimizer) if deferred is None else deferred,
        timeout,
        {"plan": plan, "bucket_bytes": bucket_bytes, "wire": wire, **options},
    )
