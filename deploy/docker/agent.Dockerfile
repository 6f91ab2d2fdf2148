# The agent, added to a training image that brings its own torch. Build from the repository's root:
#   docker build -f deploy/docker/agent.Dockerfile --build-arg BASE=my-training-image:7 -t my-training-image:7-rankscope .
# BASE must have Python 3.10 or newer as `python`, and torch 2.4 or newer.
ARG BASE=pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime

FROM python:3.12-slim AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# One wheel for every Python from 3.10 on.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=wheel /wheel /tmp/wheel
# Plain, without extras: torch stays the image's own.
RUN python -m pip install --no-cache-dir /tmp/wheel/*.whl
