"""Programs as the documentation of torch and of others shows them, as cells of a notebook.

What is changed: sizes, paths, and made data with a seed, so that losses can be compared. `DEVICE`
and `GROUP` are what the tutorials take from `torch.accelerator`, or name "cuda" and "nccl" for.
"""

from __future__ import annotations

DDP = """
# Getting Started with Distributed Data Parallel (pytorch.org/tutorials/intermediate/ddp_tutorial)
import os
import sys
import tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
import torch.multiprocessing as mp

from torch.nn.parallel import DistributedDataParallel as DDP

def setup(rank, world_size):
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '12355'

    # initialize the process group
    dist.init_process_group(GROUP, rank=rank, world_size=world_size)

def cleanup():
    dist.destroy_process_group()

class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

torch.manual_seed(0)
inputs, targets = torch.randn(40, 10), torch.randn(40, 5)

def demo_basic(rank, world_size):
    print(f"Running basic DDP example on rank {rank}.")
    setup(rank, world_size)

    # create model and move it to the device
    torch.manual_seed(1)
    model = ToyModel().to(DEVICE)
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.1)

    for step in range(5):
        optimizer.zero_grad()
        outputs = ddp_model(inputs[rank::world_size].to(DEVICE))
        labels = targets[rank::world_size].to(DEVICE)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)

    cleanup()
    print(f"Finished running basic DDP example on rank {rank}.")

def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn,
             args=(world_size,),
             nprocs=world_size,
             join=True)

def demo_checkpoint(rank, world_size):
    print(f"Running DDP checkpoint example on rank {rank}.")
    setup(rank, world_size)

    model = ToyModel().to(DEVICE)
    ddp_model = DDP(model)

    CHECKPOINT_PATH = "model.checkpoint"
    if rank == 0:
        # All processes should see same parameters as they all start from same
        # random parameters and gradients are synchronized in backward passes.
        # Therefore, saving it in one process is sufficient.
        torch.save(ddp_model.state_dict(), CHECKPOINT_PATH)

    # Use a barrier() to make sure that process 1 loads the model after process
    # 0 saves it.
    dist.barrier()
    # configure map_location properly
    map_location = {f'{DEVICE}:0': f'{DEVICE}:0'}
    ddp_model.load_state_dict(
        torch.load(CHECKPOINT_PATH, map_location=map_location, weights_only=True))

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)

    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10).to(DEVICE))
    labels = torch.randn(20, 5).to(DEVICE)

    loss_fn(outputs, labels).backward()
    optimizer.step()

    # Not necessary to use a dist.barrier() to guard the file deletion below
    # as the AllReduce ops in the backward pass of DDP already served as
    # a synchronization.

    if rank == 0:
        os.remove(CHECKPOINT_PATH)

    cleanup()
    print(f"Finished running DDP checkpoint example on rank {rank}.")
"""
DDP_RUN = """
losses = []
world_size = int(os.environ["WORLD_SIZE"])
run_demo(demo_basic, world_size)
run_demo(demo_checkpoint, world_size)
"""
DDP_ALONE = """
torch.manual_seed(1)
alone, model = [], ToyModel()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    loss = nn.MSELoss()(model(inputs), targets)
    loss.backward()
    optimizer.step()
    alone.append(loss.item())
"""

FSDP2 = """
# Getting Started with Fully Sharded Data Parallel (FSDP2): github.com/pytorch/examples,
# distributed/FSDP2: model.py, checkpoint.py, utils.py and example.py, one after the other
import os
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict,
    set_optimizer_state_dict, StateDictOptions)
from torch.distributed.fsdp import FSDPModule, fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor, DTensor, Shard

@dataclass
class ModelArgs:
    n_layers: int = 2
    vocab_size: int = 8
    max_seq_len: int = 16
    dim: int = 16
    n_heads: int = 4
    dropout_p: float = 0.1

class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        assert args.dim % args.n_heads == 0
        self.head_dim = args.dim // args.n_heads
        self.n_heads = args.n_heads
        self.dropout_p = args.dropout_p
        self.resid_dropout = nn.Dropout(args.dropout_p)

        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x):
        bsz, seq_len, _ = x.size()
        queries, keys, values = self.wq(x), self.wk(x), self.wv(x)
        queries = queries.view(bsz, seq_len, self.n_heads, self.head_dim)
        keys = keys.view(bsz, seq_len, self.n_heads, self.head_dim)
        values = values.view(bsz, seq_len, self.n_heads, self.head_dim)

        queries = queries.transpose(1, 2)  # (bsz, n_heads, seq_len, head_dim)
        keys = keys.transpose(1, 2)  # (bsz, n_heads, seq_len, head_dim)
        values = values.transpose(1, 2)  # (bsz, n_heads, seq_len, head_dim)

        output = F.scaled_dot_product_attention(
            queries, keys, values, None, self.dropout_p if self.training else 0,
        )
        output = output.transpose(1, 2).contiguous().view(bsz, seq_len, -1)
        return self.resid_dropout(self.wo(output))

    def reset_parameters(self):
        self.wq.reset_parameters()
        self.wk.reset_parameters()
        self.wv.reset_parameters()
        self.wo.reset_parameters()

class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout_p):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.gelu = nn.GELU()
        self.w2 = nn.Linear(hidden_dim, dim)
        self.resid_dropout = nn.Dropout(dropout_p)

    def forward(self, x):
        return self.resid_dropout(self.w2(self.gelu(self.w1(x))))

    def reset_parameters(self):
        self.w1.reset_parameters()
        self.w2.reset_parameters()

class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.feed_forward = FeedForward(
            args.dim, hidden_dim=4 * args.dim, dropout_p=args.dropout_p
        )

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        out = h + self.feed_forward(self.ffn_norm(h))
        return out

    def reset_parameters(self):
        self.attention_norm.reset_parameters()
        self.attention.reset_parameters()
        self.ffn_norm.reset_parameters()
        self.feed_forward.reset_parameters()

# A toy transformer model, partly inspired by the nanoGPT model:
# https://github.com/karpathy/nanoGPT.
class Transformer(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        assert args.vocab_size is not None
        assert args.max_seq_len is not None
        self.model_args = args
        self.max_seq_len = args.max_seq_len
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.dropout = nn.Dropout(args.dropout_p)
        self.layers = nn.ModuleList()
        for _ in range(args.n_layers):
            self.layers.append(TransformerBlock(args))
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens):
        _bsz, seq_len = tokens.size()
        assert seq_len <= self.max_seq_len
        h = self.tok_embeddings(tokens)
        pos = torch.arange(0, seq_len, device=tokens.device)
        p = self.pos_embeddings(pos)  # positional embeddings of shape (seq_len, dim)
        h = h + p
        h = self.dropout(h)
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h)
        output = self.output(h).float()
        return output

    def reset_parameters(self):
        self.tok_embeddings.reset_parameters()
        self.pos_embeddings.reset_parameters()
        for layer in self.layers:
            layer.reset_parameters()
        self.norm.reset_parameters()
        self.output.reset_parameters()

MODEL_CHECKPOINT = "model_state_dict.pt"
OPTIM_CHECKPOINT = "optim_state_dict.pt"
PARAMS = "params"

def get_latest_checkpoint_folder(path):
    max_num = None
    if not os.path.exists(path):
        return max_num
    for name in os.listdir(path):
        folder_path = os.path.join(path, name)
        if os.path.isdir(folder_path):
            try:
                num = int(name)
                if max_num is None or num > max_num:
                    max_num = num
            except ValueError:
                pass  # Skip non-numeric folder names
    return max_num

class Checkpointer:
    def __init__(self, folder: str, dcp_api: bool):
        self.folder = folder
        self.dcp_api = dcp_api
        self.last_training_time = get_latest_checkpoint_folder(
            f"{folder}/{'dcp_api' if dcp_api else 'dtensor_api'}"
        )

    def is_empty(self):
        return self.last_training_time is None

    def load_model(self, model: FSDPModule):
        last_model_checkpoint = (
            f"{self.folder}/{'dcp_api' if self.dcp_api else 'dtensor_api'}"
            f"/{self.last_training_time}/{MODEL_CHECKPOINT}"
        )
        full_sd = torch.load(
            last_model_checkpoint, mmap=True, weights_only=True, map_location="cpu"
        )
        if self.dcp_api:
            set_model_state_dict(
                model=model,
                model_state_dict=full_sd,
                options=StateDictOptions(
                    full_state_dict=True,
                    broadcast_from_rank0=True,
                ),
            )
            return
        meta_sharded_sd = model.state_dict()
        sharded_sd = {}
        for param_name, full_tensor in full_sd.items():
            sharded_meta_param = meta_sharded_sd.get(param_name)
            sharded_tensor = distribute_tensor(
                full_tensor,
                sharded_meta_param.device_mesh,
                sharded_meta_param.placements,
            )
            sharded_sd[param_name] = nn.Parameter(sharded_tensor)
        # choose `assign=True` since we cannot call `copy_` on meta tensor
        model.load_state_dict(sharded_sd, strict=False, assign=True)

    def load_optim(self, model: FSDPModule, opt: torch.optim.Optimizer):
        last_optim_checkpoint = (
            f"{self.folder}/{'dcp_api' if self.dcp_api else 'dtensor_api'}"
            f"/{self.last_training_time}/{OPTIM_CHECKPOINT}"
        )
        full_sd = torch.load(
            last_optim_checkpoint, mmap=True, weights_only=True, map_location="cpu"
        )
        if self.dcp_api:
            set_optimizer_state_dict(
                model=model,
                optimizers=opt,
                optim_state_dict=full_sd,
                options=StateDictOptions(
                    full_state_dict=True,
                    broadcast_from_rank0=True,
                ),
            )
            return
        _init_optim_state(opt)
        param_groups = opt.state_dict()["param_groups"]
        state = opt.state_dict()["state"]

        full_param_groups = full_sd["param_groups"]
        full_state = full_sd["state"]

        for param_group, full_param_group in zip(param_groups, full_param_groups):
            for key, value in full_param_group.items():
                if key == PARAMS:
                    continue
                param_group[key] = value
            for pid, full_pid in zip(param_group[PARAMS], full_param_group[PARAMS]):
                if pid not in state:
                    continue
                param_state = state[pid]
                full_param_state = full_state[full_pid]
                for attr, full_tensor in full_param_state.items():
                    sharded_tensor = param_state[attr]
                    if isinstance(sharded_tensor, DTensor):
                        # exp_avg is DTensor
                        param_state[attr] = distribute_tensor(
                            full_tensor,
                            sharded_tensor.device_mesh,
                            sharded_tensor.placements,
                        )
                    else:
                        # step is plain tensor
                        param_state[attr] = full_tensor
        opt.load_state_dict(
            {
                "param_groups": param_groups,
                "state": state,
            }
        )

    def _get_full_model_state_dict(self, model: FSDPModule):
        if self.dcp_api:
            return get_model_state_dict(
                model=model,
                options=StateDictOptions(
                    full_state_dict=True,
                    cpu_offload=True,
                ),
            )

        sharded_sd = model.state_dict()
        cpu_state_dict = {}
        for param_name, sharded_param in sharded_sd.items():
            full_param = sharded_param.full_tensor()
            if torch.distributed.get_rank() == 0:
                cpu_state_dict[param_name] = full_param.cpu()
            else:
                del full_param
        return cpu_state_dict

    def _get_full_optimizer_state_dict(self, model: FSDPModule, opt: torch.optim.Optimizer):
        if self.dcp_api:
            return get_optimizer_state_dict(
                model=model,
                optimizers=opt,
                options=StateDictOptions(
                    full_state_dict=True,
                    cpu_offload=True,
                ),
            )
        is_rank_zero = torch.distributed.get_rank() == 0
        sharded_sd = opt.state_dict()
        sharded_state = sharded_sd["state"]
        full_state = {}
        for group_id, sharded_group in sharded_state.items():
            group_state = {}
            for attr, sharded_tensor in sharded_group.items():
                if isinstance(sharded_tensor, DTensor):
                    # "exp_avg" in AdamW is `DTensor`
                    full_tensor = sharded_tensor.full_tensor()
                else:
                    # "step" in AdamW is plain tensor
                    full_tensor = sharded_tensor
                if is_rank_zero:
                    group_state[attr] = full_tensor.cpu()
                else:
                    del full_tensor
            if is_rank_zero:
                full_state[group_id] = group_state
            else:
                del group_state
        if is_rank_zero:
            return {
                "param_groups": sharded_sd["param_groups"],
                "state": full_state,
            }
        else:
            return {}

    def save(self, model: FSDPModule, optim: torch.optim.Optimizer):
        model_state_dict = self._get_full_model_state_dict(model)
        optim_state_dict = self._get_full_optimizer_state_dict(model, optim)
        if torch.distributed.get_rank() == 0:
            new_training_time = int(time.time() * 1000)
            folder = f"{self.folder}/{'dcp_api' if self.dcp_api else 'dtensor_api'}"
            new_checkpoint_folder = f"{folder}/{new_training_time}"
            new_model_checkpoint = f"{new_checkpoint_folder}/{MODEL_CHECKPOINT}"
            new_optim_checkpoint = f"{new_checkpoint_folder}/{OPTIM_CHECKPOINT}"
            os.makedirs(new_checkpoint_folder, exist_ok=True)
            torch.save(model_state_dict, new_model_checkpoint)
            torch.save(optim_state_dict, new_optim_checkpoint)

def _init_optim_state(optim: torch.optim.Optimizer) -> None:
    if optim.state:
        return  # The optimizer state is initialized.

    for param_group in optim.param_groups:
        for param in param_group[PARAMS]:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)

    lrs = []
    for param_group in optim.param_groups:
        if "lr" in param_group:
            lrs.append(param_group["lr"])
            param_group["lr"] = 0.0
    optim.step(closure=None)
    # Whether to recover the "lr" should not matter too much as we will
    # restore checkpointing later.
    for param_group in optim.param_groups:
        if "lr" in param_group:
            param_group["lr"] = lrs.pop(0)
    optim.zero_grad(set_to_none=True)

def inspect_model(model: FSDPModule):
    assert isinstance(model, Transformer)
    assert isinstance(model, FSDPModule)

    for param in model.parameters():
        assert param.placements == (Shard(0),)
        assert param.dtype == torch.float32
        # print(param.get_local_tensor().device)

def inspect_mixed_precision(model: FSDPModule):
    model.unshard()
    for param in model.parameters(recurse=False):
        assert param.dtype == torch.bfloat16
    model.reshard()

def set_modules_to_forward_prefetch(model, num_to_forward_prefetch):
    for i, layer in enumerate(model.layers):
        if i >= len(model.layers) - num_to_forward_prefetch:
            break
        layers_to_prefetch = [
            model.layers[i + j] for j in range(1, num_to_forward_prefetch + 1)
        ]
        layer.set_modules_to_forward_prefetch(layers_to_prefetch)

def set_modules_to_backward_prefetch(model, num_to_backward_prefetch):
    for i, layer in enumerate(model.layers):
        if i < num_to_backward_prefetch:
            continue
        layers_to_prefetch = [
            model.layers[i - j] for j in range(1, num_to_backward_prefetch + 1)
        ]
        layer.set_modules_to_backward_prefetch(layers_to_prefetch)

@dataclass
class Args:
    explicit_prefetching: bool = False
    mixed_precision: bool = False
    dcp_api: bool = False

vocab_size = 64
batch_size = 8
seq_len = 16
model_args = ModelArgs(
    n_layers=3,
    n_heads=4,
    vocab_size=vocab_size,
    max_seq_len=seq_len,
    dropout_p=0,
)
torch.manual_seed(0)
x_all = torch.randint(0, vocab_size, (20, batch_size, seq_len))

def main(args, steps):
    device = torch.device(DEVICE)
    torch.distributed.init_process_group(backend=GROUP)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    with torch.device("meta"):
        model = Transformer(model_args)
    fsdp_kwargs = {}
    if args.mixed_precision:
        fsdp_kwargs["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
        )
    for layer in model.layers:
        fully_shard(layer, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)

    inspect_model(model)

    if args.explicit_prefetching:
        set_modules_to_forward_prefetch(model, num_to_forward_prefetch=2)
        set_modules_to_backward_prefetch(model, num_to_backward_prefetch=2)

    checkpointer = Checkpointer("checkpoints", dcp_api=args.dcp_api)
    if checkpointer.last_training_time is None:
        model.to_empty(device=device)
        set_model_state_dict(  # instead of reset_parameters(): the weights of one process
            model, whole_weights(),
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    else:
        checkpointer.load_model(model)

    if args.mixed_precision:
        inspect_mixed_precision(model)

    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    if checkpointer.last_training_time is not None:
        checkpointer.load_optim(model, optim)

    for step in steps:
        if args.explicit_prefetching:
            model.unshard()
        x = x_all[step, rank::world].to(device)
        loss = loss_of(model, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        yield mean.item() / world

    checkpointer.save(model, optim)
    torch.distributed.destroy_process_group()

def loss_of(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())

def whole_weights():
    torch.manual_seed(1)
    return Transformer(model_args).state_dict()
"""
FSDP2_RUN = """
import shutil
if os.environ["RANK"] == "0":
    shutil.rmtree("checkpoints", ignore_errors=True)
losses = []
for dcp_api in (False, True):
    for steps in (range(4), range(4, 8)):  # the second part continues from the checkpoint
        losses += main(Args(dcp_api=dcp_api, explicit_prefetching=dcp_api), steps)
for loss in main(Args(dcp_api=True, mixed_precision=True), range(8, 10)):
    assert loss < losses[0]
"""
FSDP2_ALONE = """
model = Transformer(model_args)
model.load_state_dict(whole_weights())
optim = torch.optim.Adam(model.parameters(), lr=1e-2)
alone = []
for step in range(8):
    loss = loss_of(model, x_all[step])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optim.step()
    optim.zero_grad()
    alone.append(loss.item())
alone *= 2
"""

TENSOR_PARALLEL = """
# Large Scale Transformer model training with Tensor Parallel (TP): github.com/pytorch/examples,
# distributed/tensor_parallelism: tensor_parallel_example.py, sequence_parallel_example.py
import os
import torch
import torch.distributed as dist
import torch.nn as nn

from torch.distributed._tensor import Shard
from torch.distributed.tensor.parallel import (
    parallelize_module,
    ColwiseParallel,
    RowwiseParallel,
)
from torch.distributed.device_mesh import init_device_mesh

class ToyModel(nn.Module):
    \"\"\"MLP based model\"\"\"

    def __init__(self):
        super(ToyModel, self).__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))

lr = 0.05

def tensor_parallel(num_iters):
    device_mesh = init_device_mesh(device_type=DEVICE, mesh_shape=(int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(1)
    tp_model = ToyModel().to(DEVICE)
    tp_model = parallelize_module(
        module=tp_model,
        device_mesh=device_mesh,
        parallelize_plan={
            "in_proj": ColwiseParallel(),
            "out_proj": RowwiseParallel(),
        },
    )
    optimizer = torch.optim.AdamW(tp_model.parameters(), lr=lr, foreach=True)
    for i in range(num_iters):
        # For TP, input needs to be same across all TP ranks.
        # Setting the random seed is to mimic the behavior of dataloader.
        torch.manual_seed(i)
        inp = torch.rand(20, 10).to(DEVICE)
        output = tp_model(inp)
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

def sequence_parallel(num_iters):
    device_mesh = init_device_mesh(device_type=DEVICE, mesh_shape=(int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(1)
    model = ToyModel().to(DEVICE)
    sp_model = parallelize_module(
        module=model,
        device_mesh=device_mesh,
        parallelize_plan={
            "in_proj": ColwiseParallel(input_layouts=Shard(0)),
            "out_proj": RowwiseParallel(output_layouts=Shard(0)),
        },
    )
    optimizer = torch.optim.AdamW(sp_model.parameters(), lr=lr, foreach=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    for i in range(num_iters):
        # For SP, input can be different across all ranks.
        torch.manual_seed(i)
        inp = torch.rand(20, 10)[10 * rank : 10 * (rank + 1)].to(DEVICE)
        output = sp_model(inp)
        loss = output.square().mean() / world
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        yield total.item()
"""
TENSOR_PARALLEL_RUN = """
losses = [*tensor_parallel(6), *sequence_parallel(6)]
"""
TENSOR_PARALLEL_ALONE = """
torch.manual_seed(1)
model = ToyModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
alone = []
for i in range(6):
    torch.manual_seed(i)
    loss = model(torch.rand(20, 10)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    alone.append(loss.item())
alone *= 2
"""

ACCELERATE = """
# accelerate's examples/nlp_example.py, with a linear model and made data
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

torch.manual_seed(0)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)

def training_function(batch_size):
    accelerator = Accelerator()
    set_seed(42)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        model.train()
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield accelerator.gather(loss.detach().reshape(1)).mean().item()
    accelerator.wait_for_everyone()
    accelerator.end_training()
"""
ACCELERATE_RUN = """
losses = list(training_function(8))
"""
ACCELERATE_ALONE = """
alone = []
set_seed(42)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
for epoch in range(2):
    for inputs, targets in zip(x.split(16), y.split(16)):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
"""
TRAINER = """
# transformers: the Trainer, with a small GPT-2 and made data
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

torch.manual_seed(0)
tokens = torch.randint(0, 32, (64, 12))
rows = [{"input_ids": row, "labels": row} for row in tokens]
config = GPT2Config(
    vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)

def make_model():
    set_seed(1)
    return GPT2LMHeadModel(config)

def make_trainer(size):
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=size, num_train_epochs=2, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True)
    return Trainer(make_model(), arguments, train_dataset=rows)
"""
TRAINER_RUN = """
trainer = make_trainer(16 // int(os.environ["WORLD_SIZE"]))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.save_model("saved")
"""
TRAINER_ALONE = """
trainer = make_trainer(16)
trainer.train()
alone = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
"""
LIGHTNING = """
# Lightning, as in its "Lightning in 15 minutes"
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Sum(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))

def make_trainer(**options):
    return L.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options)

def train(trainer, batch_size):
    torch.manual_seed(0)
    losses.clear()
    trainer.fit(Sum(), DataLoader(data, batch_size))
    return [*losses]

losses = []
above = make_trainer()  # where there is one process
"""
LIGHTNING_RUN = """
ranks = int(os.environ["WORLD_SIZE"])
first = train(above, 64 // ranks)
for strategy in ("auto", "ddp_notebook", "ddp_spawn"):
    for _ in range(2):
        trainer = make_trainer(strategy=strategy, devices="auto" if strategy == "auto" else ranks)
        assert train(trainer, 64 // ranks) == first
        assert (trainer.world_size, trainer.global_rank) == (ranks, int(os.environ["RANK"]))
    fabric = L.Fabric(strategy=strategy, devices="auto" if strategy == "auto" else ranks)
    assert fabric.launch(lambda fabric, n: (fabric.world_size, n), 3) == (ranks, 3)
losses = first
"""
LIGHTNING_ALONE = """
losses, alone = losses, train(make_trainer(devices=1), 64)
"""
LIGHTNING_REFUSED = """
def linear():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters())

for use, error in {
    lambda: train(make_trainer(devices=1), 8): "Trainer does not know the other 1 rank",
    lambda: L.Fabric(devices=1).setup(*linear()): "Fabric does not know the other 1 rank",
    lambda: train(make_trainer(devices=3, strategy="ddp_notebook"), 8): "--cores 3",
    lambda: make_trainer(accelerator="gpu"): "no GPU. Leave accelerator out",
    lambda: make_trainer(accelerator="tpu"): "torch_xla's, and the run has",
}.items():
    try:
        use()
    except Exception as refused:
        assert type(refused).__name__ == "SetupError" and error in str(refused), refused
    else:
        assert False, error
"""
TRAINED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def start():
    dist.init_process_group(GROUP)
    return make(), data(dist.get_rank())

def data(seed):
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8).to(DEVICE)

def fit(model, x, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if dist.is_initialized():
            dist.all_reduce(loss.detach())
        optimizer.step()
"""
TRAINED_RUNS = {
    # What the card says of the models, and a train cell.
    "one model": ("", "model, x = start()\nfit(DistributedDataParallel(model), x)"),
    "no DistributedDataParallel": ("different", "fit(*start())"),
    "its module": (
        "different",
        "model, x = start()\nfit(DistributedDataParallel(model).module, x)",
    ),
    "alone": ("alone", "fit(make(), data(0))"),
    "alone, on other data": ("alone", "fit(make(), data(int(os.environ['RANK'])))"),
    "trials": ("", "fit(make(), data(0), lr=0.1 * (1 + int(os.environ['RANK'])))"),
    "one rank": ("", "#\nfit(make(), data(0))"),
    "ensemble, collected": (
        "",
        "model, x = start()\nfit(model, x)\nmodels = [None] * 2\n"
        "dist.all_gather_object(models, [each.tolist() for each in model.parameters()])",
    ),
    "pipeline": (
        "",
        """
_, x = start()
rank = dist.get_rank()
torch.manual_seed(rank)
stage = torch.nn.Linear(8, 8).to(DEVICE)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    received = torch.empty_like(x)
    if rank == 0:
        sent = stage(x)
        dist.send(sent.detach(), 1)
        dist.recv(received, 1)
        sent.backward(received)
    else:
        dist.recv(received, 0)
        stage(received.requires_grad_()).square().mean().backward()
        dist.send(received.grad, 0)
    optimizer.step()
""",
    ),
    "tensor parallel": (
        "",
        """
_, x = start()
torch.manual_seed(dist.get_rank())
half = torch.nn.Linear(8, 8).to(DEVICE)
optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    part = half(data(0))
    whole = part.detach().clone()
    dist.all_reduce(whole)
    part.backward(whole)
    optimizer.step()
""",
    ),
}
