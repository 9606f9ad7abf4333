"""Weights that stay in host memory and are streamed to the card, one layer computed while the next is fetched.

A layer of B bytes takes f = B ÷ bandwidth to fetch, and c to compute. A pass over L
layers that are all fetched takes

    f + (L − 1) · max(f, c) + c      with the next layer fetched meanwhile, into a second room
    L · (f + c)                      without

so that one token takes the time in which all weights cross the link, unless a layer
computes for longer than it travels: with many tokens at once, as in a prefill.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import nn

from .model.transformer import Transformer
from .specs.check import number, whole
from .specs.quantity import quantity
from .specs.units import decimal, seconds


class Stream:
    """While it is open, `model` computes from weights that are fetched layer by layer; its outputs keep every bit.

    `with Stream(model, "2 GB/s") as stream: model.generate(tokens, 20)`, or `stream.close()` in the end. The card has
    room for two layers (one without `prefetch`), the first `resident` layers, and embedding, norm and head. `model` is
    plain, cut or quantised: what it holds is what travels.

    On a GPU (`device="cuda"`) layers are pinned in host memory and copied beside the computation. On a CPU a copy in
    memory stands in for the link, and takes bytes ÷ `bandwidth` seconds: a text with its unit, or bytes a second
    (`find_link("pcie5").per_direction`); None does not wait. (No test of ours has run the GPU's way.)

    `held` is bytes of weights on the card, `layer_bytes` what a layer weighs. Counted are `fetched` bytes of the layers
    used, `fetching` seconds that they took on the link, and `waited` seconds in which the computation stood still for
    them. Raises ValueError on weights that are not in host memory, on layers that differ in shape, on a model that is
    streamed already, and in a pass that autograd records: its weights would be gone before backward.
    """

    def __init__(self, model: Transformer, bandwidth: str | float | None = None, *, prefetch: bool = True,
                 resident: int = 0, device: torch.device | str = "cpu"):
        self.device, self.prefetch = torch.device(device), prefetch
        self.bandwidth, self.resident = _rate(bandwidth), whole("resident", resident, least=0)
        layers = _checked(model, self.resident)
        self.fetched, self.fetching, self.waited = 0, 0.0, 0.0
        self._kept = [part for name, part in model.named_children() if name != "layers"] + layers[:resident]
        for part in self._kept:
            part.to(self.device)
        self._parameters = [list(layer.parameters()) for layer in layers[resident:]]
        self._homes = [[self._home(parameter) for parameter in each] for each in self._parameters]
        self._rooms = [[torch.empty_like(home, device=self.device) for home in self._homes[0]]
                       for _ in range(1 + prefetch)]
        kept = {parameter for part in self._kept for parameter in part.parameters()}
        self.layer_bytes = sum(home.nbytes for home in self._homes[0])
        self.held = len(self._rooms) * self.layer_bytes + sum(parameter.nbytes for parameter in kept)
        self._coming: tuple[int, Future[float]] | None = None
        self._closing = threading.Event()
        self._worker = ThreadPoolExecutor(1, "offload")
        self._hooks = []
        for n, layer in enumerate(layers, start=-resident):  # the resident ones are below 0
            self._leave(n)
            self._hooks.append(layer.register_forward_pre_hook(partial(self._enter, n)))
            self._hooks.append(layer.register_forward_hook(partial(self._leave, n), always_call=True))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Make the model plain again, all of it in host memory; the thread that fetched has ended."""
        self._closing.set()
        self._worker.shutdown(cancel_futures=True)
        for hook in self._hooks:
            hook.remove()
        for n in range(len(self._homes)):
            self._leave(n)
        for part in self._kept:
            part.to("cpu")
        self._rooms.clear()

    @property
    def predicted(self) -> float:
        """Seconds that the bytes fetched so far take at `bandwidth`; 0 where that is None."""
        return self.fetched / self.bandwidth if self.bandwidth else 0.0

    def pass_seconds(self, compute: float) -> float:
        """Seconds that a pass takes by the formula, where a layer computes for `compute` seconds."""
        fetch, streamed = self.layer_bytes / self.bandwidth if self.bandwidth else 0.0, len(self._homes)
        hidden = streamed - (self.resident == 0) if self.prefetch else 0  # that have a layer computed before them
        alone = self.resident + streamed - hidden
        return alone * compute + hidden * max(fetch, compute) + (streamed - hidden) * fetch

    def __repr__(self) -> str:
        rate = f"{decimal(self.bandwidth)}/s" if self.bandwidth else "as fast as memory"
        return "\n".join((
            f"on the card  {decimal(self.held)}, with {1 + self.prefetch} × {decimal(self.layer_bytes)} for layers",
            f"fetched      {decimal(self.fetched)} at {rate}: {seconds(self.predicted)} predicted",
            f"measured     {seconds(self.fetching)}, for {seconds(self.waited)} of which the computation waited"))

    def _home(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.data.pin_memory() if self.device.type == "cuda" else parameter.data

    def _enter(self, n: int, *_: object) -> None:
        """Before layer `n`: wait for its weights, and send for the next layer's."""
        if torch.is_grad_enabled():
            raise ValueError("streamed weights are gone before a backward pass: "
                             "use torch.no_grad()")
        if n >= 0:
            began, fetch = time.perf_counter(), self._send_for(n)
            self._coming = None
            self.fetching += fetch.result()
            self.waited += time.perf_counter() - began
            self.fetched += self.layer_bytes
            for parameter, data in zip(self._parameters[n], self._room(n), strict=True):
                parameter.data = data
        if self.prefetch and 0 <= n + 1 < len(self._homes):
            self._send_for(n + 1)

    def _leave(self, n: int, *_: object) -> None:
        """After layer `n`, also where it failed: its parameters are at home again."""
        if n >= 0:
            for parameter, home in zip(self._parameters[n], self._homes[n], strict=True):
                parameter.data = home

    def _send_for(self, n: int) -> Future[float]:
        """The fetch of layer `n`, begun if it was not; the layer that had its room before is computed."""
        if self._coming is None or self._coming[0] != n:
            computed = None  # the event on a GPU: a CPU has computed what it came past
            if self.device.type == "cuda":
                computed = torch.cuda.current_stream(self.device).record_event()
            self._coming = n, self._worker.submit(self._fetch, n, computed)
        return self._coming[1]

    @torch.no_grad()
    def _fetch(self, n: int, computed: torch.cuda.Event | None) -> float:
        """In the thread: copy layer `n`, at the pace of the link; the seconds it took."""
        began = time.perf_counter()
        copy(self._homes[n], self._room(n), computed)
        if self.bandwidth:
            due = began + self.layer_bytes / self.bandwidth
            self._closing.wait(due - time.perf_counter())
        return time.perf_counter() - began

    def _room(self, n: int) -> list[torch.Tensor]:
        return self._rooms[n % len(self._rooms)]


def copy(home: list[torch.Tensor], room: list[torch.Tensor],
         computed: torch.cuda.Event | None) -> None:
    """Copy `home` into `room` and wait for it; on a GPU after the event `computed`."""
    if computed is None:
        for target, source in zip(room, home, strict=True):
            target.copy_(source)
        return
    beside = torch.cuda.Stream(room[0].device)
    with torch.cuda.stream(beside):
        beside.wait_event(computed)
        for target, source in zip(room, home, strict=True):
            target.copy_(source, non_blocking=True)
    beside.synchronize()


def _rate(bandwidth: str | float | None) -> float | None:
    """Bytes a second, from a number or a text with its unit."""
    if isinstance(bandwidth, str):
        bandwidth = float(quantity("bandwidth", bandwidth, "B/s"))
    return None if bandwidth is None else number("bandwidth", bandwidth)


def _checked(model: Transformer, resident: int) -> list[nn.Module]:
    """The layers of a model that can be streamed, `resident` of them kept; ValueError saying why another can't be."""
    layers = list(model.layers)
    if resident >= len(layers):
        raise ValueError(f"resident = {resident} of {len(layers)} layers leaves none to stream")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(f"{name} is on {parameter.device}: a model is streamed from host memory")
    if len({tuple((p.shape, p.dtype) for p in layer.parameters()) for layer in layers[resident:]}) > 1:
        raise ValueError("the layers to stream differ in shape, and share one room: keep those before resident")
    if any(layer._forward_pre_hooks for layer in layers):
        raise ValueError("this model is streamed already: close that stream first")
    return layers
