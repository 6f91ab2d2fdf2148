# The collector: no torch. Build from the repository's root:
#   docker build -f deploy/docker/collector.Dockerfile -t rankscope-collector .
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY . .
# The compiled parts are the agent's: a collector needs none, so this stage needs no compiler.
RUN RANKSCOPE_BUILD_KERNEL=0 pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir "$(echo /wheel/*.whl)[collector]" \
    && rm -r /wheel \
    && useradd --uid 10001 --no-create-home rankscope \
    && install -d -o rankscope -g rankscope /data
USER 10001
VOLUME /data
EXPOSE 4317
HEALTHCHECK --interval=30s --timeout=5s CMD \
    ["python", "-c", "import socket; socket.create_connection(('127.0.0.1', 4317), 3)"]
ENTRYPOINT ["rankscope", "serve"]
CMD ["--store", "/data/runs", "--listen", "0.0.0.0:4317", "--insecure"]
