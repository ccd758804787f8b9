# The package on an image that has torch, which stays as it is: docker build --build-arg BASE=YOUR_IMAGE -t fused-ce .
# Its command checks the head on the machine's GPU: docker run --gpus all fused-ce
ARG BASE=nvcr.io/nvidia/pytorch:25.10-py3
FROM ${BASE}
COPY setup.py pyproject.toml README.md LICENSE /src/
COPY megatron_fused_ce /src/megatron_fused_ce
COPY kernels /src/kernels
COPY scripts /src/scripts
RUN pip install --no-cache-dir /src && rm -r /src && python -m megatron_fused_ce autoload install
CMD ["python", "-m", "megatron_fused_ce", "selfcheck"]
