# syntax=docker/dockerfile:1

# The image of the static tuner. A study's pod takes the binary out of it with an init container, so that the main
# container can be the very vLLM image that production runs; it also runs `tuner` by itself.

FROM golang:1.26-bookworm AS build
ARG VERSION=dev
WORKDIR /src
# The modules change less often than the code: they have a layer of their own.
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN make static VERSION="$VERSION" STATIC=/out/tuner

FROM scratch
COPY --from=build /out/tuner /tuner
# The init container needs one command, and a static busybox called cp is cp.
COPY --from=busybox:1.37-musl /bin/busybox /bin/cp
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY LICENSE /LICENSE
USER 65532:65532
ENTRYPOINT ["/tuner"]
