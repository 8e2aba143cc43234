"""Handwritten digits with a parameter server. Every command in a terminal of its own, in any order:

    gradwire serve --parameters --workers 2 --port 7070 --state server-state
    RANK=0 WORLD_SIZE=2 python examples/parameter_server.py
    RANK=1 WORLD_SIZE=2 python examples/parameter_server.py

Any of the three may be killed and started again: the job goes on. Needs scikit-learn, for the data.
"""

from __future__ import annotations

import argparse
import os
from itertools import islice

import torch
from sklearn.datasets import load_digits
from torch import nn

import gradwire as gw

BATCH = 32


def main() -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", default="127.0.0.1:7070")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    worker, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    images, targets = load_digits(return_X_y=True)
    inputs = torch.tensor(images[worker::num_workers], dtype=torch.float32) / 16
    labels = torch.tensor(targets[worker::num_workers])
    steps = len(images) // num_workers // BATCH  # of an epoch, the same for all workers

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # the server steps it and keeps its state
    with gw.ParameterClient(model, optimizer, arguments.server, compressor="threelc") as client:
        while client.steps < arguments.epochs * steps:  # a worker that comes back goes on where the job is
            epoch, done = divmod(client.steps, steps)
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
            for batch in islice(order.split(BATCH), done, steps):
                loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
                loss.backward()  # pushes each gradient as soon as it is computed
                client.step()  # replaces optimizer.step() and optimizer.zero_grad()
            client.wait()
            print(f"worker {worker}, epoch {epoch}: loss {loss.item():.4f}", flush=True)
        print(f"worker {worker}: {client.sent_bytes:,} bytes sent, {client.received_bytes:,} received")
    return model


if __name__ == "__main__":
    main()
