"""A model and its optimizer, bound to an exchange: the effects of a training loop's calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pgasdl.context import Context
from pgasdl.errors import BufferRefusedError, ConfigError, PgasTimeoutError, PlanError
from pgasdl.group import Group
from pgasdl.torch.attachment import modes
from pgasdl.torch.attachment.guards import guard
from pgasdl.torch.attachment.hooks import Callbacks, LoopHooks
from pgasdl.torch.attachment.kinds import Average, Kind
from pgasdl.torch.attachment.layers import ModelLayer, Settings, State, find_layers, require_in
from pgasdl.torch.attachment.optimizer import (
    OptimizerState,
    PartialStep,
    has_step_hooks,
    steps_by_parameter,
)
from pgasdl.torch.attachment.replicate import broadcast
from pgasdl.torch.attachment.update import Update
from pgasdl.torch.untraced import untraced
from pgasdl.training.exchange import GradientExchange
from pgasdl.training.passenger import Passenger


class Attachment:
    """A model and its optimizer, bound to an exchange: made by :func:`attach`.

    Attributes
    ----------
    model : nn.Module
        The model.
    optimizer : Optimizer
        Its optimizer.
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
        kind: str,
        deferred: bool,
        early: bool,
        timeout: float | None,
        job: Passenger | None,
        options: dict[str, Any],
    ) -> None:
        self.model, self.optimizer, self.deferred = model, optimizer, deferred
        self._layers = find_layers(model, optimizer)
        self._layers[-1].passenger = job  # its gradient is the first that backward has
        self._layer_of = {each: layer for layer in self._layers for each in layer.parameters}
        self._step = PartialStep(optimizer)
        self._state = OptimizerState(optimizer, self._fetch_state)
        self._to_scatter = False
        # With early steps: those of this backward, by layer, and how they are made.
        self._early, self._begun = early, set[ModelLayer]()
        self._settings: Settings | None = None
        self._average: Average | None = None
        self._kind: Kind
        given = {"group": group, "timeout": timeout, **options}
        if kind == "average":
            self._kind = self._average = Average(self._layers, self._step, context, **given)
        else:
            self._kind = Update(self._layers, optimizer, self._step, context, **given)
        try:
            broadcast(model, context, group, timeout)
        except BaseException:
            self._kind.close(finish=False)
            raise
        self._kind.place()
        if self._average is None:
            self._scatter_state()
        self._exchanging = True
        calls = Callbacks(
            self._before_gradient,
            self._have_gradient,
            self._use,
            self._optimizer_step,
            self.zero_grad,
            self._before_state,
            self._after_state,
        )
        self._hooks = LoopHooks(model, optimizer, self._layers, calls)

    @property
    def exchange(self) -> GradientExchange:
        """The exchange of the gradients; its layers are the modules that have parameters."""
        return self._kind.exchange

    # --- what PyTorch calls

    @untraced  # a compiled function's backward calls it
    def _before_gradient(self, layer: ModelLayer, number: int, gradient: Tensor) -> None:
        """Refuse a gradient before it is added to memory that is not this rank's to change."""
        name = layer.names[number]
        if gradient.layout is not torch.strided:
            raise BufferRefusedError(
                f"parameter {name} gets a sparse gradient: use it with sparse=False"
            )
        if layer.step is not None and layer not in self._begun:
            raise PlanError(
                f"parameter {name} was used before its last step was made, in a way that PyTorch "
                "does not tell of: call synchronize() before such a use"
            )
        if layer.state is State.LOCAL:
            return
        if layer in self._begun:
            raise PlanError(
                f"parameter {name} gets another gradient, but early=True has made its step: put "
                "every backward but the last before a step into no_sync()"
            )
        if layer.state is not State.EXCHANGING and not layer.has_spent():
            self._renew()
            return
        if layer.state is State.SPENT:
            raise PlanError(
                f"parameter {name} gets another gradient, but its last one is used up: call "
                'zero_grad() after each step; kind="average" keeps gradients'
            )
        raise PlanError(
            f"parameter {name} gets another gradient while its last one is {layer.state.value}: "
            "put every backward but the last before a step into no_sync(), and call zero_grad() "
            "after one that no step follows"
        )

    @untraced
    def _have_gradient(self, layer: ModelLayer, number: int, _: Tensor) -> None:
        """Backward has a parameter's gradient; with its layer's last one the exchange starts."""
        if torch.is_grad_enabled() and layer.has_graph(number):  # backward(create_graph=True)
            if not self._exchanging:
                return  # the program may compute of it
            raise PlanError(
                f"the gradient of {layer.names[number]} has a graph, which the mean of all ranks "
                "has not: put backward(create_graph=True) into no_sync(), and what is computed of "
                "the gradients into a backward of its own"
            )
        layer.take(number)
        if not self._exchanging:
            return
        layer.arrived.add(number)
        if len(layer.arrived) == len(layer.parameters):
            if self._early:
                self._begin_early(layer)
            self._begin(layer)
        else:
            guard(layer.views[number], partial(self._look, layer))

    def _optimizer_step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            if not steps_by_parameter(self.optimizer):
                raise ConfigError(
                    "step(closure) is for PyTorch's own optimizers but LBFGS, which call it once, "
                    "before they step: call backward, then step()"
                )
            with torch.enable_grad():
                loss = closure()
        self._make_step()
        return loss

    def _make_step(self) -> None:
        require_in(self._layer_of, self.optimizer)
        scaled = getattr(self.optimizer, "found_inf", None) is not None
        if scaled and (self._average is None or self.deferred):
            raise ConfigError(
                "GradScaler leaves its part to this optimizer's step, which may be made later: "
                'attach with kind="average", deferred=False'
            )
        rest = [layer for layer in self._layers if layer not in self._begun]
        for layer in rest:
            self._take(layer)  # if the last forward did not use it
        self._kind.before_step(rest)
        self._begin_all(rest)
        for layer in self._layers:
            layer.claim()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
        if self._average is not None and (not self.deferred or has_step_hooks(self.optimizer)):
            self._average.step_at_once()
            return
        self._scatter_state()
        settings = self._step.settings(self._state.kept)
        self._require_settings(settings)
        self._begun.clear()
        for layer in rest:
            layer.step = settings
            layer.note_weights()
            layer.guard_parameters(partial(self._use, layer), averages=self._average is not None)
        self._kind.stepped()
        for layer in self._layers:
            if not self.deferred or layer.state is State.AVERAGED:
                self._take(layer)

    def _begin_early(self, layer: ModelLayer) -> None:
        """Let the owners make the layer's step as soon as they can."""
        if not self._begun:
            self._scatter_state()
            self._settings = self._step.settings(self._state.kept)
            self._kind.before_step(self._layers)
        self._take(layer)  # of the last backward, if forward did not use it
        self._begun.add(layer)
        layer.step = self._settings

    def _require_settings(self, settings: Settings) -> None:
        """Refuse hyperparameters of a step that are not those of its early part."""
        for number, (group, early) in enumerate(zip(settings, self._settings or (), strict=False)):
            for name, value in group.items() if self._begun else ():
                if not _same(value, early.get(name)):
                    raise PlanError(
                        f"{name} of the optimizer's group {number} was {early.get(name)} in "
                        f"backward, where early=True made steps with it, and is {value} in step(): "
                        "change hyperparameters after step()"
                    )

    def _before_state(self, saving: bool) -> None:
        self.synchronize()
        self._to_scatter = not saving or self._state.away  # unless the program looks at it

    def _after_state(self) -> None:
        if self._average is None and self._to_scatter:
            self._scatter_state()

    def _fetch_state(self) -> None:
        self.synchronize()
        with modes.left():
            self._kind.gather_state(self._state.kept)

    def _scatter_state(self) -> None:
        self._state.adopt()
        if not self._state.away:
            with modes.left():
                self._kind.scatter_state(self._state.kept)
        self._state.away = True

    def _use(self, layer: ModelLayer) -> None:
        """Make the layer's parameters ready for the program."""
        if layer in self._begun and torch._C._current_graph_task_id() < 0:
            raise PlanError(
                f"{', '.join(layer.names)}: used between backward and optimizer.step(), when "
                "early=True makes the steps of some layers: call step() before, and put every "
                "backward but the last before a step into no_sync()"
            )
        self._take(layer)
        self._kind.before_use(layer)

    def _look(self, layer: ModelLayer) -> None:
        """Make the layer's gradients ready for the program: the mean of all ranks."""
        self._require_average("a look at a gradient")
        if layer.step is not None:
            self._take(layer)
            return
        if torch._C._current_graph_task_id() >= 0:
            raise PlanError(
                f"the gradient of one of {', '.join(layer.names)} is looked at while backward "
                "runs, before it is the mean of all ranks"
            )
        before = {each: each.grad for each in self._layer_of}
        self.wait()
        for each, gradient in before.items():
            if each.grad is not gradient:  # which the program may hold
                raise PlanError(
                    f"this rank's backward did not reach parameter {self._name_of(each)}, as "
                    "another's did, or its gradient was set by hand: call wait() before gradients "
                    "are looked at"
                )

    # --- layers

    def _begin_all(self, layers: Sequence[ModelLayer]) -> None:
        for layer in layers:
            self._take(layer)  # if the last forward did not use it
            if layer.state in (State.LOCAL, State.SPENT):
                self._begin(layer)

    def _renew(self) -> None:
        """Begin anew with the layers whose gradients the program has removed: all at once.

        Ranks' backwards may reach different ones, and a bucket travels as a whole.
        """
        for layer in self._layers:
            over = layer.state in (State.AVERAGED, State.SPENT)
            if over and layer.step is None and not layer.has_spent():
                layer.renew()

    def _begin(self, layer: ModelLayer) -> None:
        self._kind.begin(layer)
        layer.guard_gradients(partial(self._look, layer))
        if self._average is None:  # peers may write to the weights from now on
            layer.change_weights()
            layer.guard_parameters(partial(self._use, layer), averages=False)

    def _leave_out(self) -> None:
        """End the exchanges of a backward that no step follows, as all ranks do."""
        if self._begun:
            raise PlanError(
                "early=True has made steps in backward: call optimizer.step() after it, or attach "
                "without early to leave steps out"
            )
        if any(each.state is State.EXCHANGING and each.step is None for each in self._layers):
            self._begin_all(self._layers)
            self._kind.complete()

    def _take(self, layer: ModelLayer) -> None:
        """Make the step that the layer still has to make."""
        if layer.step is None:
            return
        layer.require_weights()
        try:
            with modes.left():
                self._kind.finish(layer)
        except PgasTimeoutError as error:
            raise PgasTimeoutError(
                f"{error}; before a rank goes on alone (to save, say), call synchronize() on all"
            ) from None
        layer.step = None

    # --- what programs call

    def wait(self) -> None:
        """Wait until every gradient is the mean of all ranks'.

        A look at a gradient does it, too, but is refused where this rank's backward did not reach
        a parameter that another's did: then call this on every rank before.

        Raises
        ------
        ConfigError
            The kind is "update", in which no rank has the whole mean.
        PgasTimeoutError
            Names what is missing; the next call continues.
        PeerLostError
            A rank died.
        MismatchError
            Ranks disagree on what they do.
        ClosedError
            The context or the exchange was closed.
        """
        self._require_average("wait()")
        for layer in self._layers:
            if layer.state is State.EXCHANGING and layer.step is None:
                layer.require_whole()
        self._begin_all(self._layers)
        self._kind.complete()

    def synchronize(self) -> None:
        """Make every step that is due: the parameters are those after ``optimizer.step()``.

        Not needed before the model is called, nor before ``state_dict``, which do it themselves.

        Raises
        ------
        PlanError
            In kind "update", after a backward without a step.
        PgasTimeoutError, PeerLostError, MismatchError, ClosedError
            As :meth:`wait`.
        """
        for layer in self._layers:
            self._use(layer)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients in a ``with`` block: for every backward but the last of a step.

        It is also for ``backward(create_graph=True)``, whose gradients keep their graph here.
        """
        before, self._exchanging = self._exchanging, False
        try:
            yield
        finally:
            self._exchanging = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of a step that is due after that step.

        It takes the place of the model's and the optimizer's ``zero_grad``. Where no step followed
        a backward, it waits for the exchanges, and may raise:

        Raises
        ------
        PgasTimeoutError, PeerLostError, MismatchError, ClosedError
            As :meth:`wait`.
        """
        self._leave_out()
        for layer in self._layers:
            if not set_to_none:
                self._take(layer)  # it needs the memory
            layer.clear(set_to_none)

    def detach(self) -> None:
        """Make every step that is due, and give model and optimizer back as they were. Idempotent.

        Gradients are set to None. In kind "update" it is collective: every optimizer gets the
        whole state.

        Raises
        ------
        PgasTimeoutError, PeerLostError, MismatchError, ClosedError
            As :meth:`wait`. Model and optimizer are given back all the same.
        """
        if not self._layer_of:
            return
        try:
            self._leave_out()
            self.synchronize()
            self._state.bring_back()
        except BaseException:
            self._release(finish=False)
            raise
        self._release(finish=True)

    def _release(self, *, finish: bool) -> None:
        self._hooks.remove()
        self._step.restore()
        self._state.release()
        for layer in self._layers:
            layer.release_gradients()
            layer.release_parameters()
        for parameter in self._layer_of:
            parameter.grad = None
        self._layer_of, self._layers = {}, []
        self._kind.close(finish=finish)

    def _name_of(self, parameter: nn.Parameter) -> str:
        layer = self._layer_of[parameter]
        numbers = range(len(layer.parameters))
        return next(layer.names[n] for n in numbers if layer.parameters[n] is parameter)

    def _require_average(self, what: str) -> None:
        if self._average is None:
            raise ConfigError(
                f'{what} needs kind="average": in kind="update" no rank has the whole mean gradient'
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.detach()
        elif self._layer_of:  # steps that are due are not made
            self._release(finish=False)

    def describe(self) -> str:
        """Describe layers, plan and memory, for a log."""
        return self.exchange.describe()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
