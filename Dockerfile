# One image for every role, on a CPU, without root:
#
#   docker build -t sordino .
#   docker run --rm -v "$PWD:/data" sordino run --data table.csv
#   docker run --rm -v "$PWD/coordinator:/data" -p 9092:9092 sordino federate coordinate …
#   docker run --rm -v "$PWD/site-north:/data" sordino federate join …
#
# On x86-64 the usual torch wheel brings several gigabytes of CUDA libraries. To leave them out, name an index that has
# CPU wheels: docker build --build-arg PIP_EXTRA_INDEX_URL=…
# `make image-steps` runs the same steps in a clean virtual environment.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
COPY . /sources
RUN sh /sources/deploy/image.sh build /sources /wheels

FROM python:${PYTHON}-slim
ARG PIP_EXTRA_INDEX_URL=""
RUN useradd --create-home --uid 10001 sordino && mkdir /data && chown sordino:sordino /data
COPY --from=wheel /wheels /wheels
COPY deploy/image.sh constraints.txt /
RUN sh /image.sh install python3 /wheels /constraints.txt && rm -r /wheels
USER sordino
WORKDIR /data
VOLUME /data
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["sordino"]
CMD ["--help"]
