package studies

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"vllmtuner/studies/fence"
)

// Delete moves a study unchanged into the trash, and the study can be moved back. Delete refuses a running study.
func TestDelete(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "llama70b")
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)))
	_, err := Delete(t.Context(), dir, time.Second)
	wantError(t, err, "delete the study in "+dir, "another tuner owns this study", "pid")
	if !errors.Is(err, ErrOwned) {
		t.Errorf("%v does not wrap ErrOwned", err)
	}
	try(t, s.Record(0, aProbe(1, 2)), s.Close())

	to, err := Delete(t.Context(), dir, time.Second)
	try(t, err)
	if names, err := List(root); err != nil || len(names) != 0 {
		t.Errorf("List = %v, %v after Delete, want none", names, err)
	}
	if !strings.HasPrefix(to, filepath.Join(root, TrashDir, "llama70b-20")) {
		t.Errorf("Delete moved the study to %s", to)
	}
	_, err = Delete(t.Context(), dir, time.Second)
	wantError(t, err, "no study", "the directory "+root+" holds no study at all")
	try(t, os.Rename(to, dir))
	again := open(t, dir)
	study, err := again.Study()
	try(t, err)
	if len(study.Trials) != 1 || len(study.Trials[0].Probes) != 2 {
		t.Errorf("moved back, the study is %+v", study)
	}
}

// Delete refuses a link, because a move would put only the link into the trash.
func TestDeleteRefusesALink(t *testing.T) {
	root, elsewhere := t.TempDir(), filepath.Join(t.TempDir(), "llama70b")
	link := filepath.Join(root, "llama70b")
	try(t, open(t, elsewhere).Close(), os.Symlink(elsewhere, link))
	_, err := Delete(t.Context(), link, time.Second)
	wantError(t, err, "it is a link to "+elsewhere)
	if _, err := ReadSnapshot(link); err != nil {
		t.Errorf("ReadSnapshot = %v after the refused Delete", err)
	}
}

// Delete checks the trash before it changes the study.
func TestDeleteWithoutTrash(t *testing.T) {
	elsewhere := t.TempDir()
	for want, put := range map[string]func(trash string) error{
		"the trash, is not a directory: move it to another place": func(trash string) error { return os.WriteFile(trash, nil, 0o644) },
		" is a link, but the trash must be a directory":           func(trash string) error { return os.Symlink(elsewhere, trash) },
	} {
		root := t.TempDir()
		dir := filepath.Join(root, "llama70b")
		try(t, open(t, dir).Close(), put(filepath.Join(root, TrashDir)))
		before := pathsIn(t, root)
		_, err := Delete(t.Context(), dir, time.Second)
		wantUnusable(t, err, "delete the study in "+dir, filepath.Join(root, TrashDir), want)
		if after := pathsIn(t, root); !slices.Equal(before, after) {
			t.Errorf("%s: the files are %v, want %v as before", want, after, before)
		}
	}
}

// Around also finds the study of a path that has links or dots.
func TestAround(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	try(t, err)
	dir, link := filepath.Join(root, "llama70b"), filepath.Join(t.TempDir(), "link")
	try(t, open(t, dir).Close(), os.Symlink(filepath.Join(dir, snapshotDir), link))
	try(t, os.WriteFile(filepath.Join(root, fence.Database), nil, 0o644)) // an export may have this name, and does not make root a study
	for path, want := range map[string]string{
		filepath.Join(dir, "one.db"):                    dir,
		database(t, dir):                                dir,
		filepath.Join(link, "one.db"):                   dir,
		filepath.Join(root, "one.db"):                   "",
		filepath.Join(root, "not", "there", "one.db"):   "",
		filepath.Join(dir, "..", "llama70b", "one.csv"): dir,
	} {
		if got := Around(path); got != want {
			t.Errorf("Around(%s) = %q, want %q", path, got, want)
		}
	}
}

// asNobody copies this test's binary into a root directory, runs it there as another user, and returns its output.
func asNobody(t *testing.T, root, dir, role string) (string, error) {
	t.Helper()
	self := filepath.Join(root, "studies.test")
	content, err := os.ReadFile(os.Args[0])
	try(t, err, os.WriteFile(self, content, 0o755), os.Chmod(root, 0o755), os.Chmod(filepath.Dir(root), 0o755))
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), childDir+"="+dir, childRole+"="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Open refuses a study that belongs to another user. The error names that user, and no file changes.
func TestAnotherUsersStudy(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user")
	}
	for _, part := range []string{".", fence.SlotDir, fence.OwnerDir, snapshotDir, currentFile} { // in each case, this one part of the study belongs to root
		t.Run(part, func(t *testing.T) {
			root := t.TempDir()
			dir := filepath.Join(root, "llama70b")
			try(t, open(t, dir).Close())
			if part != "." {
				try(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
					return errors.Join(err, os.Chown(path, 65534, 65534))
				}), os.Chown(filepath.Join(dir, part), 0, 0))
			}
			before := pathsIn(t, dir)
			out, err := asNobody(t, root, dir, "")
			if err == nil {
				t.Fatalf("another user could open the study: %s", out)
			}
			for _, want := range []string{"open study llama70b", "permission denied", filepath.Join(dir, part) + " belongs to root (uid 0) with mode -rw",
				"and this is nobody (uid 65534): run as that user, or use another --root"} {
				if !strings.Contains(out, want) {
					t.Errorf("the output is %s, want %q in it", out, want)
				}
			}
			if after := pathsIn(t, dir); !slices.Equal(before, after) {
				t.Errorf("the files are %v, want %v as before", after, before)
			}
		})
	}
}

// pathsIn returns the paths of all files in a directory and below.
func pathsIn(t *testing.T, dir string) (paths []string) {
	t.Helper()
	try(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		paths = append(paths, path)
		return err
	}))
	return paths
}

// Open and Delete refuse a study in which a file or a link has taken the place of a part. They refuse it before they
// change anything.
func TestPartsThatAreNotTheStudys(t *testing.T) {
	elsewhere := t.TempDir()
	link := func(path string) error { return os.Symlink(elsewhere, path) }
	file := func(path string) error { return os.WriteFile(path, nil, 0o644) }
	folder := func(path string) error { return os.Mkdir(path, 0o755) }
	for _, tt := range []struct {
		part string
		put  func(path string) error
		want string
	}{
		{fence.SlotDir, file, "is not a directory, so it cannot hold the list of the study's owners: move it to another place"},
		{fence.SlotDir, link, "is a link"},
		{fence.OwnerDir, file, "is not a directory"},
		{fence.OwnerDir, link, "is a link"},
		{snapshotDir, file, "is not a directory"},
		{snapshotDir, link, "is a link: the published snapshots must be in the study's own directory; replace the link by the directory that it leads to"},
		{backupDir, file, "is not a directory"},
		{"e000000000001", link, "is a link: an epoch must be in the study's own directory"},
		{currentFile, folder, "is not a file"},
		{currentFile, link, "is a link"},
	} {
		dir := t.TempDir()
		try(t, open(t, dir).Close())
		path := filepath.Join(dir, tt.part)
		try(t, os.RemoveAll(path), tt.put(path))
		before := pathsIn(t, dir)
		_, _, err := Open(t.Context(), dir, llama, Options{})
		wantUnusable(t, err, path+" "+tt.want)
		if after := pathsIn(t, dir); !slices.Equal(before, after) {
			t.Errorf("%s: the files are %v, want %v as before", err, after, before)
		}
		_, err = Delete(t.Context(), dir, time.Second)
		wantUnusable(t, err, path+" "+tt.want)
	}
}

// The directory of an epoch has a database, but is no study.
func TestAnEpochIsNoStudy(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	try(t, err)
	dir := filepath.Join(root, "llama70b")
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)))
	epoch := filepath.Join(dir, s.lease.Dir())
	_, err = Delete(t.Context(), epoch, time.Second)
	wantUnusable(t, err, "delete "+epoch+": it is a part of the study in "+dir)
	if names, err := List(dir); err != nil || len(names) > 0 {
		t.Errorf("List of a study's directory = %v, %v; want none", names, err)
	}
	try(t, s.Record(0, aProbe(0, 2)), s.Close())
}

// A directory that this user may not read counts as a study only if its name is valid for a study.
func TestListUnreadable(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user")
	}
	root := t.TempDir()
	for _, name := range []string{"lost+found", TrashDir, "hidden"} {
		try(t, os.Mkdir(filepath.Join(root, name), 0o700))
	}
	out, err := asNobody(t, root, root, "list")
	try(t, err)
	if out != "[hidden]\n" {
		t.Errorf("List prints %s, want [hidden]", out)
	}
}

// damageProbes overwrites one page of a snapshot with zeros. The page has only probes, so a reader of summaries does
// not notice.
func damageProbes(t *testing.T, path string) {
	t.Helper()
	content, err := os.ReadFile(path)
	try(t, err)
	const page = 4096
	for at := page; at < len(content); at += page {
		changed := slices.Clone(content)
		clear(changed[at : at+page])
		try(t, os.WriteFile(path, changed, 0o644))
		_, read := inFile(path, publishedOptions, loadSummary)
		_, damage := inFile(path, publishedOptions, checkDatabase)
		_, probes := inFile(path, publishedOptions, load)
		if read == nil && damage != nil && probes != nil {
			return
		}
	}
	t.Fatalf("%s has no page with only probes", path)
}

// inOneBase makes a study whose newest snapshot is a base. The snapshot before it has another base and fewer commits.
func inOneBase(t *testing.T) (dir string, all []snapshot) {
	t.Helper()
	dir = t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)))
	for seq := range 40 {
		try(t, s.Record(0, aProbe(seq, 2)))
	}
	try(t, s.Finish(0, aResult(2)), s.Close(), open(t, dir).Close())
	all, err := snapshots(dir)
	try(t, err)
	if len(all) < 2 || !all[0].isBase() || all[1].baseSnapshot() == all[0] {
		t.Fatalf("the snapshots are %v, want a base and then one with another base", all)
	}
	return dir, all
}

// If the newest snapshot is damaged, an older one is exported, with a warning. If all are damaged, the error says how
// to publish the study again.
func TestExportOfADamagedSnapshot(t *testing.T) {
	dir, all := inOneBase(t)
	newest := filepath.Join(dir, all[0].file())
	damageProbes(t, newest)
	path := filepath.Join(t.TempDir(), "one.db")
	for _, export := range []func() (Study, error){
		func() (Study, error) { return Export(t.Context(), dir, path) },
		func() (Study, error) { return readThroughEach(dir) },
	} {
		study, err := export()
		try(t, err)
		if !strings.Contains(study.Behind, "read "+newest) || study.Commits != all[1].commits {
			t.Errorf("Behind = %q with %d commits, want the damage of %s and the %d commits of the one before", study.Behind, study.Commits, newest, all[1].commits)
		}
	}
	if commits, err := inFile(path, publishedOptions, checkDatabase); err != nil || commits != all[1].commits {
		t.Errorf("the export has %d commits, %v; want %d", commits, err, all[1].commits)
	}

	for _, n := range all[1:] {
		try(t, os.Remove(filepath.Join(dir, n.file())))
	}
	const remedy = "`tuner run` publishes the study again if its database is undamaged"
	_, err := Export(t.Context(), dir, path)
	wantUnusable(t, err, "read "+newest, remedy)
	_, err = readThroughEach(dir)
	wantUnusable(t, err, "read "+newest, remedy)
	_, err = ReadSnapshot(dir)
	wantUnusable(t, err, "read "+newest, remedy)
	try(t, open(t, dir).Close(), errorOf(Export(t.Context(), dir, path)))
}

// If the exported file cannot be written, the error does not call the snapshot damaged.
func TestExportCannotWrite(t *testing.T) {
	dir, _ := inOneBase(t)
	path := filepath.Join(t.TempDir(), "none", "one.db")
	_, err := Export(t.Context(), dir, path)
	wantError(t, err, "open "+path)
	if strings.Contains(err.Error(), snapshotDir) || errors.Is(err, ErrUnusable) {
		t.Errorf("Export = %v, want no word of the snapshot", err)
	}
}
