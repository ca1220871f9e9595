package fence

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// A Mount is the file system that a directory is on.
type Mount struct {
	Point   string   `json:"point"`
	Type    string   `json:"type"`    // such as ext4, nfs4
	Source  string   `json:"source"`  // such as server:/export
	Options []string `json:"options"` // options of the mount and of the file system, such as hard, vers=4.2
}

// MountOf returns the mount of a directory that exists.
func MountOf(dir string) (Mount, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if err == nil {
		dir, err = filepath.Abs(dir)
	}
	if err != nil {
		return Mount{}, err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.ParentsFilter(dir))
	if err != nil {
		return Mount{}, err
	}
	return innermost(dir, mounts)
}

// innermost returns the mount that contains a path. The list mounts has the mounts on the path and on its parents. If
// two mounts have the same mount point, the later one hides the earlier one.
func innermost(path string, mounts []*mountinfo.Info) (Mount, error) {
	if len(mounts) == 0 {
		return Mount{}, fmt.Errorf("no mount point in /proc/self/mountinfo contains %s", path)
	}
	on := mounts[0]
	for _, m := range mounts[1:] {
		if len(m.Mountpoint) >= len(on.Mountpoint) {
			on = m
		}
	}
	options := append(strings.Split(on.Options, ","), strings.Split(on.VFSOptions, ",")...)
	slices.Sort(options)
	return Mount{on.Mountpoint, on.FSType, on.Source, slices.Compact(options)}, nil
}

// has reports whether an option is set.
func (m Mount) has(option string) bool { return slices.Contains(m.Options, option) }

// NFS reports whether the file system is NFS, of any version.
func (m Mount) NFS() bool { return m.Type == "nfs" || m.Type == "nfs4" }

// singleHostTypes lists the types of file systems that only one host uses.
var singleHostTypes = []string{"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "f2fs", "bcachefs", "ramfs", "rootfs", "vfat", "exfat"}

// sharedTypes lists the types of file systems whose locks (flock(2)) all hosts see, unless mount options prevent that.
var sharedTypes = []string{"nfs", "nfs4", "ceph", "fuse.ceph-fuse", "lustre", "gpfs", "beegfs", "gfs2", "ocfs2", "cifs", "smb3", "fuse.glusterfs", "fuse.juicefs"}

// Locks says what locks on the mount prove. On an unknown file system they prove nothing, because it may keep its locks
// on one host.
func (m Mount) Locks() Locks {
	switch {
	case slices.Contains(singleHostTypes, m.Type):
		return CertainLocks
	case m.has("nolock"), m.has("local_lock=all"), m.has("local_lock=flock"), !slices.Contains(sharedTypes, m.Type):
		return NoLocks
	}
	return SharedLocks
}

// Check returns an error if the mount is unfit for a study, and warnings for the user.
func (m Mount) Check() (warnings []string, err error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	return m.check(host)
}

// check does what Check does, for a host with the given name.
func (m Mount) check(host string) (warnings []string, err error) {
	if !m.NFS() {
		if m.Locks() == NoLocks {
			warnings = append(warnings, fmt.Sprintf("%s is on %s, whose locks may not reach other hosts: after a crash, the next run waits until the old "+
				"owner has been silent for --takeover-after", m.Point, m.Type))
		}
		return warnings, nil
	}
	for _, soft := range []string{"soft", "softerr"} {
		if m.has(soft) {
			return nil, fmt.Errorf("%s is mounted with %s: while the server does not answer, writes fail or are lost without an error (nfs(5)); mount it with hard",
				m.Point, soft)
		}
	}
	if m.Locks() == NoLocks {
		warnings = append(warnings, fmt.Sprintf("%s is mounted without locks that other hosts see (%s): after a crash, the next run waits until the old owner has been silent for --takeover-after",
			m.Point, strings.Join(m.lockOptions(), ", ")))
	}
	if m.has("nocto") {
		warnings = append(warnings, fmt.Sprintf("%s is mounted with nocto: a host may read old content of a file, so that readers and tuners see an older study "+
			"(nfs(5)); mount it without nocto", m.Point))
	}
	if host == "" || host == "localhost" || strings.HasPrefix(host, "localhost.") {
		warnings = append(warnings, fmt.Sprintf("this host is called %q: two NFS clients with the same name take each other's locks away; give each host its own name", host))
	}
	return warnings, nil
}

func (m Mount) lockOptions() []string {
	return slices.DeleteFunc(slices.Clone(m.Options), func(o string) bool { return o != "nolock" && !strings.HasPrefix(o, "local_lock=") })
}
