#!/usr/bin/env bash
# Runs a program on real NFS: two clients and a server, in one emulated machine, without KVM and without NFS in this host's kernel.
#
#   run.sh [options] -- PROGRAM [ARGS…]
#
# The machine boots Debian's cloud kernel with a small file system of its own. In it a kernel nfsd exports an ext4 disk. Two
# nodes mount it at /mnt/nfs over a bridge; each has a network, mounts, a host name and an NFS client of its own. PROGRAM runs on node a.
# This script prints its output and has its exit code.
#
# Inside, for PROGRAM:
#   on a|b CMD…          run CMD on a node               partition a|b, heal a|b   cut its network, connect it
#   nfsd-restart [S]     stop nfsd, start it S later     srv CMD…                  run CMD on the server; the export is its /srv/export
#   server-crash [S]     cut the server's power and start it S later, while its clients live on (studies.test must be in /payload)
# Options:
#   --disk FILE      keep the exported disk in FILE (by default it is a new one, removed afterwards)
#   --add FILE       put a file into /payload; repeatable
#   --env K=V        environment of PROGRAM; repeatable
#   --lease S        NFSv4 lease and grace in seconds (10; Linux has 90)
#   --timeout S      end the machine after S seconds (300), with exit code 124
#   --kill-after S   cut the power S seconds after the first line of PROGRAM that begins with ack, with exit code 99
#   --setup          no more than set it up
#
# Needs root, Debian packages (installed: qemu, busybox, cpio, e2fsprogs, kmod; unpacked only: a kernel and the NFS tools), 60 MB in
# ~/.cache/tuner-nfs (TUNER_NFS_CACHE). Exit code 77: it cannot be set up here.
set -euo pipefail
main() {
HERE=$(cd "$(dirname "$0")" && pwd)
CACHE=${TUNER_NFS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tuner-nfs}
DISK= LEASE=10 TIMEOUT=300 KILLAFTER=
ADD=() ENVS=()
ONLY_SETUP=
while [ $# -gt 0 ]; do
  case $1 in
    --setup) ONLY_SETUP=1; shift; continue ;;
    --disk) DISK=$2 ;; --add) ADD+=("$2") ;; --env) ENVS+=("$2") ;; --lease) LEASE=$2 ;;
    --timeout) TIMEOUT=$2 ;; --kill-after) KILLAFTER=$2 ;;
    --) shift; break ;;
    *) echo "run.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done

need() { command -v "$1" >/dev/null 2>&1; }
setup() { # Debian packages only; kernel and nfs-utils are unpacked, never installed on the host
  mkdir -p "$CACHE"; exec 9>"$CACHE/lock"; flock 9
  if [ -e "$CACHE/base.cpio.ok" ] && [ "$CACHE/base.cpio.ok" -nt "$HERE/init" ] && [ "$CACHE/base.cpio.ok" -nt "$HERE/run.sh" ] && need qemu-system-x86_64; then flock -u 9; return; fi
  if ! { need qemu-system-x86_64 && need cpio && [ -x /bin/busybox ] && need mke2fs && need depmod; }; then
    [ "$(id -u)" = 0 ] && need apt-get || { echo "run.sh: needs qemu, busybox, cpio, e2fsprogs and kmod, or root and apt-get" >&2; exit 77; }
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || true
    apt-get install -y -qq --no-install-recommends qemu-system-x86 busybox-static cpio e2fsprogs kmod >"$CACHE/apt.log" 2>&1 || { tail -n 3 "$CACHE/apt.log" >&2; exit 77; }
  fi
  local x="$CACHE/x" d="$CACHE/debs"
  if [ ! -e "$CACHE/x.ok" ]; then
    rm -rf "$x" "$d"; mkdir -p "$x" "$d"
    local kpkg; kpkg=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/{print $2; exit}')
    # libraries are downloaded too, so the host needs only libc
    local libs; libs=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances nfs-kernel-server nfs-common 2>/dev/null |
        grep -E '^(lib(nfsidmap|tirpc|event|sqlite3|krb5|gssapi|k5crypto|com-err|keyutils|blkid|uuid|mount|selinux|pcre2|cap|wrap|devmapper|nl-|udev|xml2|lzma|icu|z)|zlib)' | grep -v -E ':|-dev|-bin' | sort -u)
    (cd "$d" && apt-get download -qq "$kpkg" nfs-common nfs-kernel-server $libs 2>/dev/null) || { echo "run.sh: a kernel and the NFS tools cannot be downloaded" >&2; exit 77; }
    for p in "$d"/*.deb; do dpkg-deb -x "$p" "$x"; done
    touch "$CACHE/x.ok"
  fi
  local kv; kv=$(ls "$x/lib/modules"); cp "$x/boot/vmlinuz-$kv" "$CACHE/vmlinuz"
  local r="$CACHE/root"; rm -rf "$r"; mkdir -p "$r"/{bin,sbin,usr,proc,sys,dev,tmp,run,etc,srv,mnt/nfs,payload,var/lib/nfs,lib64,root} "$r/lib/modules"
  cp /bin/busybox "$r/bin/busybox"; for a in $("$r/bin/busybox" --list | grep -vx busybox); do ln -sf busybox "$r/bin/$a"; done
  rm -f "$r/bin/mount.nfs"
  local bins=(sbin/mount.nfs usr/sbin/rpc.nfsd usr/sbin/rpc.mountd usr/sbin/exportfs usr/sbin/nfsdcld)
  local lp; lp=$(find "$x" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
  for b in "${bins[@]}"; do cp "$x/$b" "$r/sbin/"; copylibs "$r" "$x/$b" "$lp"; done
  ln -sf mount.nfs "$r/sbin/mount.nfs4"
  # only the modules that are needed
  local m="$x/lib/modules/$kv"; [ -e "$m/modules.dep" ] || depmod -b "$x" "$kv"
  for mod in virtio_pci virtio_blk virtio_net virtio_mmio nfsd nfs nfsv4 nfsv3 lockd veth bridge; do
    for f in $(awk -v t="/$mod.ko:" 'index($1,t){gsub(":","");print}' "$m/modules.dep"); do
      mkdir -p "$r/lib/modules/$kv/$(dirname "$f")"; cp -n "$m/$f" "$r/lib/modules/$kv/$f"; done; done
  cp "$m"/modules.{order,builtin,builtin.modinfo} "$r/lib/modules/$kv/"; depmod -b "$r" "$kv"
  cp "$HERE/init" "$r/init"; chmod 755 "$r/init"
  echo 'root:x:0:0:root:/root:/bin/sh' >"$r/etc/passwd"; echo 'root:x:0:' >"$r/etc/group"
  printf 'hosts: files\npasswd: files\ngroup: files\nservices: files\nprotocols: files\n' >"$r/etc/nsswitch.conf"
  printf '127.0.0.1 localhost\n10.0.0.1 server\n10.0.0.11 node-a\n10.0.0.12 node-b\n' >"$r/etc/hosts"
  printf 'tcp\t6\tTCP\nudp\t17\tUDP\n' >"$r/etc/protocols"; printf 'nfs\t2049/tcp\nsunrpc\t111/tcp\n' >"$r/etc/services"
  printf 'tcp tpi_cots_ord v inet tcp - -\nudp tpi_clts v inet udp - -\ntcp6 tpi_cots_ord v inet6 tcp - -\nudp6 tpi_clts v inet6 udp - -\n' >"$r/etc/netconfig"
  ln -sf /proc/mounts "$r/etc/mtab"
  (cd "$r" && find . | cpio -o -H newc -R 0:0 --quiet >"$CACHE/base.cpio")
  touch "$CACHE/base.cpio.ok"; flock -u 9
}
copylibs() { # root binary [libpath]
  local l; for l in $(LD_LIBRARY_PATH=${3:-} ldd "$2" 2>/dev/null | grep -oE '/[^ ]+\.so[^ ]*'); do
    case $l in */ld-linux*) mkdir -p "$1/lib64"; cp -nL "$l" "$1/lib64/";; *) mkdir -p "$1/lib/x86_64-linux-gnu"; cp -nL "$l" "$1/lib/x86_64-linux-gnu/";; esac; done; return 0; }
setup
[ -z "$ONLY_SETUP" ] || exit 0

W=$(mktemp -d "${TMPDIR:-/tmp}/tunernfs.XXXXXX"); QPID=
cleanup() { [ -n "$QPID" ] && kill -9 "$QPID" 2>/dev/null || true; rm -rf "$W"; }
trap cleanup EXIT
P="$W/p"; mkdir -p "$P/payload"
if [ $# -gt 0 ]; then
  prog=$(command -v "$1"); cp "$prog" "$P/payload/prog"; chmod 755 "$P/payload/prog"; copylibs "$P" "$prog"; shift
  printf '%s\n' "$@" >"$P/payload/args"; [ $# -gt 0 ] || : >"$P/payload/args"
fi
for e in "${ENVS[@]:-}"; do [ -n "$e" ] && printf '%s\n' "$e"; done >"$P/payload/env" || true
for a in "${ADD[@]:-}"; do
  [ -n "$a" ] || continue
  cp -aL "$a" "$P/payload/"; copylibs "$P" "$a"
done
(cd "$P" && find . | cpio -o -H newc -R 0:0 --quiet) | cat "$CACHE/base.cpio" - >"$W/initrd"
if [ -z "$DISK" ]; then DISK="$W/disk.img"; fi
if [ ! -e "$DISK" ]; then truncate -s 256M "$DISK"; mke2fs -q -t ext4 -b 4096 -F "$DISK"; fi
: >"$W/out"
args=(-M q35 -nodefaults -no-user-config -display none -no-reboot -accel tcg -cpu max -m 512 -smp 2
  -kernel "$CACHE/vmlinuz" -initrd "$W/initrd"
  -append "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off random.trust_cpu=on tsc=unstable no_timer_check nowatchdog tunernfs.lease=$LEASE"
  -drive "file=$DISK,format=raw,if=none,id=d,cache=writeback" -device virtio-blk-pci,drive=d
  -serial "file:$W/console" -chardev "file,id=o,path=$W/out" -device isa-serial,chardev=o)
nice -n 5 qemu-system-x86_64 "${args[@]}" 2>"$W/qemu.err" & QPID=$!
tail -n +1 -f "$W/out" --pid=$QPID 2>/dev/null | sed -u '/^RIG-/d' & TPID=$!
t0=$SECONDS; started= acked=
rc=
while kill -0 $QPID 2>/dev/null; do
  sleep 0.2
  if [ -z "$started" ] && grep -q '^RIG-START' "$W/out"; then started=$SECONDS; fi
  if [ -n "$KILLAFTER" ] && [ -z "$acked" ] && grep -q '^ack' "$W/out"; then acked=$SECONDS; fi
  if [ -n "$acked" ] && [ $((SECONDS-acked)) -ge "$KILLAFTER" ]; then kill -9 $QPID; rc=99; break; fi
  if [ $((SECONDS-t0)) -ge "$TIMEOUT" ]; then kill -9 $QPID; rc=124; break; fi
done
wait $QPID 2>/dev/null || true; QPID=; wait $TPID 2>/dev/null || true
cp "$W/console" "$CACHE/last-console.log"; 
if [ -z "$rc" ]; then rc=$(sed -n 's/^RIG-EXIT \([0-9]*\).*/\1/p' "$W/out" | tail -1); rc=${rc:-99}; fi
if [ -z "$started" ]; then echo "run.sh: the machine did not start; its console:" >&2; tail -40 "$W/console" >&2; cat "$W/qemu.err" >&2; fi
exit "$rc"
}
main "$@"
