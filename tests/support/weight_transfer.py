# SPDX-License-Identifier: Apache-2.0
"""A weight transfer engine for vLLM whose trainer is a file: stock's have no CPU. `Registered` makes it known."""

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class Nothing(WeightTransferInitInfo):
    pass


@dataclass
class File(WeightTransferUpdateInfo):
    """path: of a safetensors file. part: of the tensors every second one, from this on; None: all."""

    path: str
    part: int | None = None


class FromFile(WeightTransferEngine[Nothing, File]):
    init_info_cls, update_info_cls = Nothing, File

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: File) -> None:
        tensors = list(load_file(update_info.path).items())
        self.model.load_weights(iter(tensors if update_info.part is None else tensors[update_info.part :: 2]))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine("file", FromFile)


class Registered:
    """For `worker_extension_cls`, which vLLM imports before it makes the engine."""
