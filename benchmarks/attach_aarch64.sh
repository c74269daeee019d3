#!/bin/sh
# Runs attach.py on an emulated 64-bit ARM machine with the Python of a Debian release; qemu-user has no ptrace. As root:
#
#     apt install qemu-system-arm mmdebstrap cpio e2fsprogs
#     benchmarks/attach_aarch64.sh FOLDER [RELEASE [ENTRIES [CPU]]]      bullseye: 3.9, bookworm: 3.11, trixie: 3.13
#
# CPU "max" has SVE, landing pads and pointer authentication, "cortex-a72" none of them. Times are those of the emulator,
# some fifty times a real machine's: only the column "harm" counts.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$1 release=${2:-bookworm} entries=${3:-100} cpu=${4:-max,pauth-impdef=on}
mirror=http://deb.debian.org/debian
mkdir -p "$folder" && cd "$folder" && rm -rf root first kernel && mkdir root first kernel
mmdebstrap --variant=extract --arch=arm64 --include=python3,busybox-static "$release" root.tar $mirror
mmdebstrap --variant=extract --arch=arm64 --include=linux-image-arm64 bookworm kernel.tar $mirror
tar -C root -xf root.tar
tar -C kernel -xf kernel.tar ./boot ./lib/modules

# Nothing was configured, only unpacked: what a start needs is made here.
busybox=$(find root -path '*bin/busybox' -type f)
mkdir -p root/proc root/sys root/dev root/tmp root/usr/bin first/bin first/root first/proc first/dev
for name in lib bin; do [ -e root/$name ] || ln -s usr/$name root/$name; done
[ -e root/usr/bin/busybox ] || cp "$busybox" root/usr/bin/busybox
ln -sf busybox root/usr/bin/true
cp root/usr/bin/busybox first/bin/
cp -r "$here/probe/zerotop_probe" "$here/benchmarks/attach.py" root/usr/lib/python3/dist-packages/
cat > root/begin <<END
#!/usr/bin/busybox sh
export PATH=/usr/bin:/bin HOME=/root
busybox mount -t proc none /proc; busybox mount -t devtmpfs none /dev; busybox mount -t tmpfs none /tmp
python3 -B /usr/lib/python3/dist-packages/attach.py --entries $entries
busybox poweroff -f
END
modules="virtio_mmio virtio_blk crc16 mbcache crc32c_generic libcrc32c jbd2 ext4"
for name in $modules; do cp "$(find kernel/lib -name $name.ko)" first/; done
cat > first/init <<END
#!/bin/busybox sh
busybox mount -t proc none /proc; busybox mount -t devtmpfs none /dev
for name in $modules; do busybox insmod /\$name.ko; done
busybox mount -t ext4 /dev/vda /root
exec busybox switch_root /root /usr/bin/busybox sh /begin
END
chmod +x first/init root/begin
(cd first && find . | cpio -o -H newc --quiet | gzip) > first.gz
rm -f root.ext4 && mkfs.ext4 -q -d root root.ext4 600M

exec qemu-system-aarch64 -M virt,gic-version=3 -cpu "$cpu" -smp 2 -m 2G -nographic -nic none -no-reboot \
    -kernel kernel/boot/vmlinuz-* -initrd first.gz -append "console=ttyAMA0 quiet panic=-1" \
    -drive if=none,id=root,file=root.ext4,format=raw -device virtio-blk-device,drive=root < /dev/null
