package host

import (
	"testing"
	"testing/fstest"
)

func TestOOMKills(t *testing.T) {
	const (
		v2     = "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
		v1     = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
		events = "low 0\nhigh 0\nmax 9\noom 4\noom_kill "
	)
	for _, row := range []struct {
		name  string
		files map[string]string
		want  int64
		at    string
	}{
		{"our group of version 2 says it for all below", map[string]string{"proc/self/cgroup": "0::/pod/tuner\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/pod/memory.events": events + "5\n", "sys/fs/cgroup/pod/tuner/memory.events": events + "2\n"}, 2, "/sys/fs/cgroup/pod/tuner/memory.events"},
		{"the group above where ours has no such controller", map[string]string{"proc/self/cgroup": "0::/pod/tuner\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/pod/memory.events": events + "5\n"}, 5, "/sys/fs/cgroup/pod/memory.events"},
		{"version 1", map[string]string{"proc/self/cgroup": "4:memory:/a\n3:cpu:/b\n", "proc/self/mountinfo": v1,
			"sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}, 3, "/sys/fs/cgroup/memory/a/memory.oom_control"},
		{"a kernel whose version 1 does not count", map[string]string{"proc/self/cgroup": "4:memory:/a\n", "proc/self/mountinfo": v1,
			"sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n", "proc/vmstat": "nr_free_pages 1\noom_kill 8\n"}, 8, "/proc/vmstat"},
		{"no cgroup is mounted", map[string]string{"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": "", "proc/vmstat": "oom_kill 8\n"}, 8, "/proc/vmstat"},
		{"nothing tells", map[string]string{"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": v2}, 0, ""},
	} {
		root := fstest.MapFS{}
		for name, text := range row.files {
			root[name] = &fstest.MapFile{Data: []byte(text)}
		}
		n, at, err := Reader{Root: root}.OOMKills()
		if n != row.want || at != row.at || err != nil {
			t.Errorf("%s: %d at %q, %v; want %d at %q", row.name, n, at, err, row.want, row.at)
		}
	}
	if _, _, err := (Reader{}).OOMKills(); err != nil {
		t.Errorf("of this machine: %v", err)
	}
}
