package fence

import (
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
)

// mounts is a /proc/self/mountinfo as Linux 6.1 writes it.
const mounts = `22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw
40 22 0:52 / /mnt rw,relatime shared:7 - nfs4 10.0.0.1:/ rw,vers=4.2,rsize=131072,hard,proto=tcp,timeo=600,retrans=2,sec=sys,clientaddr=10.0.0.11,local_lock=none,addr=10.0.0.1
41 40 0:53 / /mnt/old\040disk rw,relatime - nfs filer:/vol/old\040disk rw,vers=3,hard,nolock,proto=tcp,local_lock=all
42 40 0:54 / /mnt/soft rw,relatime - nfs4 filer:/soft rw,vers=4.1,soft,timeo=30,local_lock=none
43 40 0:55 / /mnt/ceph rw,relatime - ceph mon:/ rw,acl
44 40 0:56 / /mnt/over rw,relatime - nfs4 filer:/first rw,vers=4.1,hard,local_lock=none
45 44 0:57 / /mnt/over rw,relatime - ext4 /dev/vdb rw
47 40 0:59 / /mnt/nocto rw,relatime - nfs4 10.0.0.1:/ rw,vers=4.2,hard,nocto,proto=tcp,local_lock=none
46 40 0:58 / /mnt/bucket rw,relatime - fuse.s3fs s3fs rw,user_id=0
`

// mountOf finds the mount of a path in a table of mounts.
func mountOf(table, path string) (Mount, error) {
	found, err := mountinfo.GetMountsFromReader(strings.NewReader(table), mountinfo.ParentsFilter(path))
	if err != nil {
		return Mount{}, err
	}
	return innermost(path, found)
}

func TestMountOf(t *testing.T) {
	for path, want := range map[string]struct {
		point, kind string
		locks       Locks
		refused     string
		warned      string
	}{
		"/srv/studies":         {"/", "ext4", CertainLocks, "", ""},
		"/dev/shm/x":           {"/dev/shm", "tmpfs", CertainLocks, "", ""},
		"/dev/shmoo":           {"/", "ext4", CertainLocks, "", ""},
		"/mnt/studies":         {"/mnt", "nfs4", SharedLocks, "", ""},
		"/mnt/old disk/a":      {"/mnt/old disk", "nfs", NoLocks, "", "(local_lock=all, nolock): after a crash, the next run waits until"},
		"/mnt/soft":            {"/mnt/soft", "nfs4", SharedLocks, "/mnt/soft is mounted with soft: ", ""},
		"/mnt/ceph":            {"/mnt/ceph", "ceph", SharedLocks, "", ""},
		"/mnt/nocto":           {"/mnt/nocto", "nfs4", SharedLocks, "", "/mnt/nocto is mounted with nocto: "},
		"/mnt/bucket":          {"/mnt/bucket", "fuse.s3fs", NoLocks, "", "/mnt/bucket is on fuse.s3fs, whose locks may not"},
		"/mnt/over/the/others": {"/mnt/over", "ext4", CertainLocks, "", ""},
	} {
		m, err := mountOf(mounts, path)
		if err != nil || m.Point != want.point || m.Type != want.kind || m.Locks() != want.locks {
			t.Errorf("mountOf(%s) = %+v with locks %d, %v; want %+v", path, m, m.Locks(), err, want)
		}
		warnings, err := m.check("node-a")
		if (err != nil) != (want.refused != "") || err != nil && !strings.Contains(err.Error(), want.refused) {
			t.Errorf("%s: check = %v, want %q", path, err, want.refused)
		}
		if text := strings.Join(warnings, "\n"); !strings.Contains(text, want.warned) || (text == "") != (want.warned == "") {
			t.Errorf("%s: warnings %q, want %q", path, text, want.warned)
		}
	}
	if _, err := mountOf("", "/x"); err == nil {
		t.Error("mountOf finds a mount in an empty table")
	}
}

// Check warns if an NFS client has the name localhost or none, because each host needs a name of its own.
func TestHostName(t *testing.T) {
	m, err := mountOf(mounts, "/mnt/studies")
	try(t, err)
	for _, host := range []string{"localhost", "localhost.localdomain", ""} {
		warnings, err := m.check(host)
		if err != nil || !slices.ContainsFunc(warnings, func(w string) bool { return strings.Contains(w, "give each host its own name") }) {
			t.Errorf("%q: warnings %q, %v; want give each host its own name", host, warnings, err)
		}
	}
}

// MountOf can read the table of the machine that runs the test.
func TestMountOfThisMachine(t *testing.T) {
	m, err := MountOf(t.TempDir())
	if err != nil || m.Type == "" {
		t.Errorf("MountOf = %+v, %v", m, err)
	}
}
