"""Finetune: freeze a part of the network, and train it later with a smaller learning rate."""

from __future__ import annotations

import re
from typing import Optional, Union

from mxnet import gluon

from ..checks import instance, real_number, short, whole_number
from ..data_parallel.cudnn_batchnorm import use_running_stats
from ..errors import TrainerError
from ..mxnet_internals.blocks import BaseBatchNorm
from ..mxnet_internals.parameters import is_differentiable
from ..protocols import SpansDevices
from ..trainer.parameters import blocks_of, named_params
from .callbacks import Callback, FitState


class Finetune(Callback):
    """Freezes parameters at first; from an epoch on they train with a smaller learning rate than the others.

    The state depends on the epoch alone, so a resumed run continues in the right phase, with the same bits. While a
    BatchNorm is frozen, it normalises by its running statistics, which stay, as in prediction.

    Parameters
    ----------
    freeze : str or gluon.Block
        A regular expression that matches the beginning of structural names, such as `"features"`; or a part of the network.
    unfreeze_epoch : int, optional
        The first epoch, from 1, in which these parameters train. None: never.
    lr_mult : float
        The factor of their learning rate then; Gluon's `Parameter.lr_mult`.

    Raises
    ------
    TrainerError
        An option is invalid, or no parameter is selected.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_mgpu import Trainer, fit
    >>> net = gluon.nn.HybridSequential()
    >>> net.add(gluon.nn.Dense(2, in_units=1), gluon.nn.Dense(1, in_units=2))
    >>> net.initialize(mx.init.One())
    >>> data = [(mx.nd.ones((4, 1)), mx.nd.ones(4))]
    >>> before = net[0].weight.data().asnumpy()
    >>> callbacks = [Finetune(net[0], unfreeze_epoch=3, lr_mult=0.1)]
    >>> history = fit(net, gluon.loss.L2Loss(), Trainer(net, "sgd"), data, epochs=2, metrics=(), callbacks=callbacks)
    >>> bool((net[0].weight.data().asnumpy() == before).all())
    True

    Source: Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification", 2018, sections 3.2 and 3.3.
    """

    def __init__(self, freeze: Union[str, gluon.Block], *, unfreeze_epoch: Optional[int] = None, lr_mult: float = 0.1) -> None:
        kinds, advice = (str, gluon.Block), "For example, pass net.features."
        instance("Finetune", "freeze", freeze, kinds, "a regular expression or a Block", advice=advice)
        if isinstance(freeze, str):
            try:
                re.compile(freeze)
            except re.error as error:
                raise TrainerError(
                    f"Finetune: got freeze={freeze!r} ({error}); expected a regular expression. Pass 'features', for example."
                ) from None
        if unfreeze_epoch is not None:
            whole_number("Finetune", "unfreeze_epoch", unfreeze_epoch, advice="For example, pass 3.")
        real_number("Finetune", "lr_mult", lr_mult, advice="0.1 is usual.")
        self._freeze, self._unfreeze_epoch, self._lr_mult = freeze, unfreeze_epoch, lr_mult

    def on_fit_begin(self, state: FitState) -> None:
        names = named_params(state.net)
        if isinstance(self._freeze, str):
            found = [param for name, param in names.items() if re.match(self._freeze, name)]
        else:
            chosen = set(self._freeze.collect_params().values())
            found = [param for param in names.values() if param in chosen]
        self._params = list(filter(is_differentiable, found))
        chosen = set(found)
        self._layers = [one for one in blocks_of(state.net) if isinstance(one, BaseBatchNorm) and one.running_mean in chosen]
        if not self._params:
            raise TrainerError(
                f"Finetune: got freeze={self._freeze!r}, which selects no parameter; expected one or more of {short([*names])}. "
                "Pass a part of the network."
            )

    def on_epoch_begin(self, state: FitState) -> None:
        is_unfrozen = self._unfreeze_epoch is not None and max(1, state.epoch) >= self._unfreeze_epoch
        grad_req = "write" if is_unfrozen else "null"
        stages = [stage.block for stage in (state.net.stages if isinstance(state.net, SpansDevices) else ())]
        use_running_stats([state.net, *stages], self._layers, not is_unfrozen)
        for param in self._params:
            param.lr_mult = self._lr_mult
            if param.grad_req != grad_req:  # setting it makes new arrays
                param.grad_req = grad_req

    def on_fit_end(self, state: FitState) -> None:
        if state.error is None:  # a resumed run that has ended before has begun no epoch
            self.on_epoch_begin(state)
