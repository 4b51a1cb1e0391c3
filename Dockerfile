# An image with megazero and everything that constraints.txt pins.
#
#   docker build -t megazero .                                                     # Debian 12, Python 3.11
#   docker build -t megazero --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .  # with nvcc: the CUDA kernels too
#   docker run --rm -it -v "$PWD:/work" megazero megazero pretrain --help
#   docker run --rm -it --gpus all --ipc=host -v "$PWD:/work" megazero torchrun --nproc-per-node 8 -m megazero.cli pretrain ...
#
# pip's own variables choose where wheels come from, for instance PyTorch's index of builds for the CPU, which are smaller:
# --build-arg PIP_EXTRA_INDEX_URL=... . The stage `dev` is for .devcontainer: tools, and no megazero.
ARG BASE=debian:12-slim

FROM ${BASE} AS dev
ARG PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CONSTRAINT
# The distribution's compiler and Python are as new as its release; what numbers depend on is pinned below.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ git openssh-client python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV HOME=/opt/megazero-home VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
RUN useradd --create-home --home-dir "$HOME" --uid 1000 --non-unique --shell /bin/bash megazero \
    && mkdir /work \
    && python3 -m venv "$VIRTUAL_ENV" \
    && chown -R megazero /work "$VIRTUAL_ENV"
USER 1000
COPY constraints.txt /tmp/constraints.txt
# torch is by far the largest, and changes least often: a layer of its own.
RUN pip install "$(grep '^torch==' /tmp/constraints.txt)"
WORKDIR /work

FROM dev
COPY --chown=megazero . /opt/megazero
WORKDIR /opt/megazero
RUN SETUP_EXTRAS=plot SETUP_OPTIONAL=fast bash -c ". scripts/setup.sh"
WORKDIR /work
CMD ["megazero", "--help"]
