#!/bin/bash
# What a machine does at boot, in namespaces of its own (pid, net, mount, uts, ipc): first `machine.py`'s
# side of it, the disk and the network card, then what cloud-init and the image do on a rented one.
#   FOLDER   the machine's scratch folder    ADDRESS  its address, with bits    NAME  its host name
#   LOGIN    the user cloud-init makes       IMAGE    the baked image           RIG   this folder's parent
#   ENDPOINT the provider's API              BINDS    SOURCE:TARGET lines: folders of this computer's
set -euo pipefail
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

echo unshared
read -r _ # the provider has put our network card in
exec </dev/null
ip link set lo up
ip addr add "$ADDRESS" dev eth0
ip link set eth0 up # and no route: a machine has no way out of the rig

# The disk: this computer's, copy-on-write. The upper layer must not be on an overlay itself.
mount --make-rprivate /
mkdir -p "$FOLDER/disk" "$FOLDER/root"
mount -t tmpfs -o size=6g tmpfs "$FOLDER/disk"
mkdir "$FOLDER/disk/upper" "$FOLDER/disk/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$FOLDER/disk/upper,workdir=$FOLDER/disk/work" "$FOLDER/root"
R=$FOLDER/root
mount -t proc proc "$R/proc"
mount --rbind /sys "$R/sys"
mount --rbind /dev "$R/dev"
mount -t tmpfs -o mode=1777 tmpfs "$R/dev/shm"
mount -t tmpfs tmpfs "$R/sys/fs/cgroup" || true
# What is not the distribution's own is not on the machine: homes, work trees, scratch.
mkdir -p "$R/mnt" "$R/opt"
for folder in "$R"/*/ "$R/var/tmp/"; do
  case ${folder#"$R"} in
    /bin/ | /boot/ | /dev/ | /etc/ | /lib*/ | /proc/ | /sbin/ | /sys/ | /usr/ | /var/) ;;
    *) mount -t tmpfs -o mode=755 tmpfs "$folder" ;;
  esac
done
chmod 1777 "$R/tmp" "$R/var/tmp"
mkdir -p "$R/run/sshd" "$R/run/lock" "$R/opt/image" "$R/opt/rig"
mount --bind -o ro "$IMAGE" "$R/opt/image"
mount --bind -o ro "$RIG" "$R/opt/rig"
cp "$FOLDER/seed.json" "$R/run/seed.json"
cp "$FOLDER/authorized_keys" "$FOLDER/commands" "$FOLDER/hurry" "$R/run/"
HOME_FOLDER=/home/$LOGIN
mkdir -p "$R$HOME_FOLDER"
layers=0
while IFS=: read -r source target; do
  [ -n "$source" ] || continue
  target=${target/#\~/$HOME_FOLDER}
  layer=$FOLDER/disk/$((++layers))
  mkdir -p "$R$target" "$layer/upper" "$layer/work"
  # Copy-on-write, its own folder open to all: on this computer it may be its owner's alone.
  mount -t overlay overlay -o "lowerdir=$source,upperdir=$layer/upper,workdir=$layer/work" "$R$target"
done <<<"$BINDS"
hostname "$NAME"
echo "$NAME" >"$R/etc/hostname"
printf '127.0.0.1 localhost\n%s %s\n' "${ADDRESS%/*}" "$NAME" >"$R/etc/hosts"
: >"$R/etc/resolv.conf"
cd "$R"
mkdir -p .old
pivot_root . .old
cd /
umount -l /.old
rmdir /.old || true

# cloud-init: the user, its key. `-p '*'`: sshd without PAM refuses a locked account.
useradd -M -u 21000 -s /bin/bash -p '*' "$LOGIN" -d "$HOME_FOLDER"
cp /etc/skel/.bashrc /etc/skel/.profile "$HOME_FOLDER/"
mkdir -p /etc/sudoers.d
echo "$LOGIN ALL=(ALL) NOPASSWD:ALL" >/etc/sudoers.d/90-cloud
chmod 440 /etc/sudoers.d/90-cloud
mkdir -p "$HOME_FOLDER/.ssh"
cp /run/authorized_keys "$HOME_FOLDER/.ssh/authorized_keys"
chmod 700 "$HOME_FOLDER/.ssh"
chmod 600 "$HOME_FOLDER/.ssh/authorized_keys"

# The image: uv, SkyPilot's runtime, its marker. Copy-on-write, because SkyPilot patches Ray in place.
mkdir -p "$HOME_FOLDER/.local/bin" "$HOME_FOLDER/.sky/wheels" "$HOME_FOLDER/skypilot-runtime" /mnt/upper /mnt/work
ln -s /opt/image/.local/bin/uv "$HOME_FOLDER/.local/bin/uv"
cp -a /opt/image/sky-user-env "$HOME_FOLDER/"
cp /opt/image/current_sky_wheel_hash "$HOME_FOLDER/.sky/wheels/"
mkdir -p /etc/uv
echo 'offline = true' >/etc/uv/uv.toml
chown 21000:21000 /mnt/upper
find "$HOME_FOLDER" -xdev -exec chown -h 21000:21000 {} +
mount -t overlay overlay -o lowerdir=/opt/image/skypilot-runtime,upperdir=/mnt/upper,workdir=/mnt/work \
  "$HOME_FOLDER/skypilot-runtime"
install -m 755 /opt/rig/inside/systemctl.sh /usr/local/bin/systemctl
install -m 755 /opt/rig/inside/systemd_run.sh /usr/local/bin/systemd-run
printf '#!/bin/sh\nkill -USR1 1\n' >/usr/local/bin/shutdown # `reaper.py` ends then, and the machine with it
chmod +x /usr/local/bin/shutdown

# The instance's metadata service, with the role's credentials.
ip addr add 169.254.169.254/32 dev lo
env -i PATH="$PATH" python3.11 /opt/rig/inside/metadata.py >/run/metadata.log 2>&1 &

# sshd with a host key of its own.
rm -f /etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
/usr/sbin/sshd -E /run/sshd.log -o UsePAM=no -o PidFile=/run/sshd.pid -o MaxStartups=100 -o MaxSessions=100 \
  -o HostKey=/etc/ssh/ssh_host_ed25519_key \
  -o "SetEnv=PATH=$PATH AWS_ENDPOINT_URL=$ENDPOINT"
# cloud-init's last stage.
while read -r command; do
  sh -c "$command" </dev/null || echo "failed: $command"
done </run/commands >/run/commands.log 2>&1
echo booted
exec python3.11 -S -E /opt/rig/inside/reaper.py
