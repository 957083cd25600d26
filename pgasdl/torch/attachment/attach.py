"""``pgasdl.torch.attach``: a training loop's gradients, exchanged while backward computes the next.

CaffeGPI's pipeline: a layer's exchange starts when backward has its gradient, and is waited for
just before the layer is next used. Every rank makes a layer's step there, or its owners have.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from torch import nn
from torch.optim import Optimizer

from pgasdl.context import Context
from pgasdl.errors import ConfigError
from pgasdl.group import Group
from pgasdl.torch.attachment.attachment import Attachment
from pgasdl.torch.attachment.optimizer import steps_by_parameter
from pgasdl.torch.linear import DistributedLinear
from pgasdl.training.passenger import Passenger


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    context: Context,
    kind: str = "average",
    group: Group | None = None,
    deferred: bool | None = None,
    early: bool = False,
    plan: str | None = None,
    bucket_bytes: int = 0,
    wire: npt.DTypeLike | None = None,
    timeout: float | None = None,
    job: Passenger | None = None,
    **options: Any,
) -> Attachment:
    """Train a model on all ranks: exchange its gradients while backward runs. Collective.

    The loop stays as it is: ``loss.backward()``, ``optimizer.step()``, ``optimizer.zero_grad()``;
    or ``optimizer.step(closure)``, as Lightning has it. Every rank makes the same number of steps.

    Parameters
    ----------
    model : nn.Module
        On the host, or on one GPU. All ranks get rank 0's parameters and buffers.
    optimizer : Optimizer
        An optimizer of parameters of the model.
    context : Context
        The context of this rank.
    kind : str, default "average"
        "average": every rank gets the mean gradients, and makes the steps; "update": the owner of
        a block - the root of plan "tree" (CaffeGPI), a rank for each block of a GDRAA -
        makes its step, and the weights travel. It alone keeps the block's optimizer state.
        MiMatrix's GDRAA, in which every worker updates, is "average" with plan "gdraa".
    group : Group, optional
        None: all ranks.
    deferred : bool, optional
        Make each layer's step just before the layer is next used, so that no rank waits for all
        layers. None: if the optimizer is one of PyTorch's own that updates each parameter by
        itself (all but LBFGS); True: you know that yours does. False: ``step()`` waits for all.
    early : bool, default False
        In kind "update": an owner makes its step as soon as it has the gradients of all ranks,
        with the hyperparameters of that moment, and new weights travel while backward computes
        lower layers. Every backward outside ``no_sync()`` is then a step: ``step()`` follows, with
        the same hyperparameters, and nothing in between decides about it (clipping, scaling).
    job : TrainingJob, optional
        The object that :func:`pgasdl.jobs.connect` returned. One element of the last layer tells
        all ranks which commands there are; that takes no further message.
    plan, bucket_bytes, wire, timeout, **options
        As for :class:`pgasdl.GradientExchange`.

    Returns
    -------
    Attachment
        For accumulation, and the end.

    Raises
    ------
    ConfigError
        The optimizer has parameters that are not the model's, one is attached already, the
        optimizer needs kind "average", or wraps another one (Accelerate's, Lightning's), or the
        model has a :class:`DistributedLinear`, which exchanges its own gradients.
    BufferRefusedError
        A parameter that is on another device, has sparse gradients, no shape yet, or a dtype that
        cannot be reduced; names it.
    MismatchError
        Ranks disagree on the model.
    PlanError
        No such plan, or it does not offer the kind.

    With ``early`` later calls raise PlanError where a step was already made and should not have
    been: other hyperparameters in ``step()``, no ``step()`` at all, a use of the model before it.
    In kind "update" backward raises PyTorch's RuntimeError if it needs a weight whose gradient it
    had before, since an owner may change it from then on; ``p.data`` hides that from PyTorch.

    Notes
    -----
    After backward ``p.grad`` is the mean of all ranks'; a look at it waits for that, and changes
    that the program makes to it have to be the same on all ranks. A step uses the gradients that
    are there at ``optimizer.step()``; later changes of ``p.grad`` have no effect. A gradient that
    the program sets itself is its rank's own until ``step()`` or :meth:`Attachment.wait`. A look at
    a parameter, or at ``optimizer.state``, makes the step that is due; get tensors of the state
    again after each step. A view that was made before ``step()``, as by ``p.detach()``, is no look:
    it shows the weights before the step until that is made, and a write by it raises PlanError then
    (by ``p.data`` it is lost unnoticed). Uses that cannot be right are refused.

    Gradients lie in a segment: ``p.grad`` is a view of it. Parameters of which no rank has a
    gradient are not updated. Buffers, such as BatchNorm's, stay each rank's own. Code in C++ that
    PyTorch does not know looks at gradients and parameters unnoticed: call ``wait()`` and
    :meth:`Attachment.synchronize` before. A step is not deferred if the optimizer has hooks of its
    step. ``torch.compile`` leaves its graph before each layer. CaffeGPI, section 3.

    In kind "update" the exchange keeps the weights, too, and an owner makes its step when it calls
    ``optimizer.step()``, with the hyperparameters of that moment. It works with PyTorch's SGD,
    Adagrad, Adadelta, RMSprop, Rprop, ASGD and the Adams but SparseAdam, which act on each element
    alone. ``optimizer.state_dict()``, a copy of the optimizer and a look at ``optimizer.state`` are
    collective: they gather the whole state, and the next step takes in what was changed; loading
    gives each rank its share. Every step needs ``zero_grad()``. No rank has the whole mean
    gradient, so neither clipping nor scaling nor a hook of the step can see it. The bits are those
    of kind "average", the same on all ranks, unless the optimizer is fused or its parameters have
    16 bits: PyTorch then rounds the last elements of a piece in another way. After an exception in
    the ``with`` block the optimizer's state is lost.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError("DistributedDataParallel averages already: attach to model.module")
    if isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} wraps the {type(inner).__name__} that makes the steps: "
            "attach to that one, which is its attribute optimizer"
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedLinear):
            raise ConfigError(
                f"layer {name!r} exchanges its own gradients: attach a module of the other layers, "
                "and give this one an optimizer of its own"
            )
    if kind not in ("average", "update"):
        raise ConfigError(f'no kind {kind!r}: there are "average" and "update"')
    if early and kind != "update":
        raise ConfigError(f'early=True needs kind="update": in kind={kind!r} no owner makes steps')
    return Attachment(
        model,
        optimizer,
        context,
        group or context.world,
        kind,
        steps_by_parameter(optimizer) if deferred is None else deferred,
        early,
        timeout,
        job,
        {"plan": plan, "bucket_bytes": bucket_bytes, "wire": wire, **options},
    )
