package weights

import (
	"bytes"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func try(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// wantError fails the test unless the error contains all words.
func wantError(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; want one with %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
}

// write makes files and their folders. A text that begins with -> makes a link.
func write(t testing.TB, dir string, texts map[string]string) {
	t.Helper()
	for name, text := range texts {
		path := filepath.Join(dir, name)
		try(t, os.MkdirAll(filepath.Dir(path), 0o755))
		if to, ok := strings.CutPrefix(text, "->"); ok {
			try(t, os.Symlink(to, path))
			continue
		}
		try(t, os.WriteFile(path, []byte(text), 0o644))
	}
}

// random returns n bytes that depend on the seed.
func random(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b) // never fails
	return b
}

// mount mounts a disk in memory, with options such as size=16m.
func mount(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("a small disk needs the right to mount: %v", err)
	}
	t.Cleanup(func() { try(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

const index = `{"metadata": {"total_size": 3}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"}}`

func TestFilesOfAFolder(t *testing.T) {
	shards := map[string]string{
		"config.json": "{}", "model.safetensors.index.json": index, "model-00001-of-00002.safetensors": "1", "model-00002-of-00002.safetensors": "22",
	}
	with := func(more map[string]string, without ...string) map[string]string {
		all := map[string]string{}
		for name, text := range shards {
			if !slices.Contains(without, name) {
				all[name] = text
			}
		}
		maps.Copy(all, more)
		return all
	}
	both := []string{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
	for _, row := range []struct {
		name  string
		texts map[string]string
		want  []string
		err   []string // words of the error; nil means none
	}{
		{"the shards of the index", shards, both, nil},
		{"what the index does not name is left out", with(map[string]string{"extra.safetensors": "x", "pytorch_model.bin": "x"}), both, nil},
		{"one file without an index", map[string]string{"model.safetensors": "m", "config.json": "{}"}, []string{"model.safetensors"}, nil},
		{"Mistral's own files come first", with(map[string]string{"consolidated.safetensors": "c"}), []string{"consolidated.safetensors"}, nil},
		{"Mistral's own shards", map[string]string{"consolidated.safetensors.index.json": `{"weight_map": {"a": "consolidated-1.safetensors"}}`,
			"consolidated-1.safetensors": "1", "consolidated-old.safetensors": "2", "model.safetensors": "3"}, []string{"consolidated-1.safetensors"}, nil},
		{"PyTorch's files without the files of a training", map[string]string{"pytorch_model.bin": "1", "training_args.bin": "2", "x.pt": "3"},
			[]string{"pytorch_model.bin"}, nil},
		{"older files of PyTorch", map[string]string{"model.pt": "1", "optimizer.pt": "2"}, []string{"model.pt"}, nil},
		{"GGUF", map[string]string{"q4.gguf": "1"}, []string{"q4.gguf"}, nil},
		{"a link to a file", with(map[string]string{both[1]: "->elsewhere", "elsewhere": "22"}, both[1]), both, nil},
		{"a missing shard is named", with(nil, both[1]), nil, []string{"lacks model-00002-of-00002.safetensors, which model.safetensors.index.json names"}},
		{"all shards are missing", with(nil, both...), nil, []string{"lacks model-00001-of-00002.safetensors and 1 more, which model.safetensors.index.json names"}},
		{"a link that leads nowhere", with(map[string]string{both[0]: "->gone"}, both[0]), nil, []string{"lacks model-00001-of-00002.safetensors"}},
		{"no weights", map[string]string{"config.json": "{}"}, nil, []string{"holds no weights"}},
		{"an index that is none", with(map[string]string{"model.safetensors.index.json": "{"}), nil, []string{"model.safetensors.index.json", "JSON"}},
		{"an index that leads out of the folder", with(map[string]string{"model.safetensors.index.json": `{"weight_map": {"a": "../../etc/passwd"}}`}), nil,
			[]string{"model.safetensors.index.json", `"../../etc/passwd", which is not in the model's folder`}},
		{"a folder in the place of a file", map[string]string{"model.safetensors/x": "1"}, nil, []string{"model.safetensors is not a file"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "a [model]")
			write(t, dir, row.texts)
			files, where, err := Files(Model{Name: dir})
			if row.err != nil {
				wantError(t, err, row.err...)
				if errors.Is(err, ErrUnknown) {
					t.Errorf("error %v would be left to a download", err)
				}
				return
			}
			try(t, err)
			var names []string
			var size int64
			for _, f := range files {
				names, size = append(names, filepath.Base(f.Path)), size+f.Size
			}
			if !slices.Equal(names, row.want) || where != dir {
				t.Errorf("the files are %q in %s, want %q in %s", names, where, row.want, dir)
			}
			if want := int64(1); row.name == "the shards of the index" && files[0].Size != want || size != sum(files) {
				t.Errorf("the files are %v, want sizes of 1 and 2", files)
			}
		})
	}
}

// hub makes a cache of the Hugging Face hub with one model. Its branch main is at commit aaa.
func hub(t *testing.T, dir string) {
	t.Helper()
	write(t, filepath.Join(dir, "models--nvidia--tiny"), map[string]string{
		"refs/main": "aaa", "refs/refs/pr/1": "bbb\n", "refs/gone": "ccc", "refs/bad": "../../other",
		"blobs/b1": "weights", "blobs/b2": "other weights",
		"snapshots/aaa/config.json": "{}", "snapshots/aaa/model.safetensors": "->../../blobs/b1",
		"snapshots/bbb/model.safetensors":            "->../../blobs/b2",
		"snapshots/ddd/model.safetensors.index.json": index,
	})
}

func TestFilesOfTheHub(t *testing.T) {
	root := t.TempDir()
	hub(t, filepath.Join(root, "hub"))
	hub(t, filepath.Join(root, ".cache", "huggingface", "hub"))
	inHome := map[string]string{"HOME": root}
	set := func(name, value string) map[string]string { return map[string]string{"HOME": "/nowhere", name: value} }
	for _, row := range []struct {
		name    string
		model   Model
		env     map[string]string
		want    string // commit of the snapshot
		size    int64
		unknown string // text in the error
	}{
		{"in the home", Model{Name: "nvidia/tiny"}, inHome, "aaa", 7, ""},
		{"HF_HUB_CACHE", Model{Name: "nvidia/tiny"}, set("HF_HUB_CACHE", root+"/hub"), "aaa", 7, ""},
		{"its older name", Model{Name: "nvidia/tiny"}, set("HUGGINGFACE_HUB_CACHE", root+"/hub"), "aaa", 7, ""},
		{"HF_HOME", Model{Name: "nvidia/tiny"}, set("HF_HOME", root), "aaa", 7, ""},
		{"HF_HOME with a variable", Model{Name: "nvidia/tiny"}, map[string]string{"BASE": root, "HF_HOME": "$BASE/.cache/huggingface"}, "aaa", 7, ""},
		{"HF_HOME below the home", Model{Name: "nvidia/tiny"}, map[string]string{"HOME": root, "HF_HOME": "~/.cache/huggingface"}, "aaa", 7, ""},
		{"XDG_CACHE_HOME", Model{Name: "nvidia/tiny"}, set("XDG_CACHE_HOME", root+"/.cache"), "aaa", 7, ""},
		{"--download-dir", Model{Name: "nvidia/tiny", CacheDir: root + "/hub"}, set("HF_HUB_CACHE", "/nowhere"), "aaa", 7, ""},
		{"a branch with a slash", Model{Name: "nvidia/tiny", Revision: "refs/pr/1"}, inHome, "bbb", 13, ""},
		{"a commit", Model{Name: "nvidia/tiny", Revision: "bbb"}, inHome, "bbb", 13, ""},
		{"a model that is not there", Model{Name: "nvidia/large"}, inHome, "", 0, "models--nvidia--large"},
		{"no cache at all", Model{Name: "nvidia/tiny"}, set("HF_HOME", "/nowhere"), "", 0, "/nowhere/hub/models--nvidia--tiny/snapshots/main"},
		{"a revision that is not there", Model{Name: "nvidia/tiny", Revision: "v2"}, inHome, "", 0, "snapshots/v2"},
		{"a revision without its snapshot", Model{Name: "nvidia/tiny", Revision: "gone"}, inHome, "", 0, "snapshots/ccc"},
		{"a download that was not finished", Model{Name: "nvidia/tiny", Revision: "ddd"}, inHome, "", 0, "lacks model-00001-of-00002.safetensors and 1 more"},
		{"a ref that leads elsewhere", Model{Name: "nvidia/tiny", Revision: "bad"}, inHome, "", 0, "there is no"},
		{"a revision that leads elsewhere", Model{Name: "nvidia/tiny", Revision: "../../x"}, inHome, "", 0, "neither a folder nor a name"},
		{"a name that leads elsewhere", Model{Name: "a/b/../../etc"}, inHome, "", 0, "neither a folder nor a name"},
		{"a folder that is not there", Model{Name: "/nowhere/model"}, inHome, "", 0, `there is no "/nowhere/model"`},
		{"no name", Model{}, inHome, "", 0, `there is no ""`},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.model.Env = func(name string) string { return row.env[name] }
			files, where, err := Files(row.model)
			if row.unknown != "" {
				wantError(t, err, "the model's weights are not on disk", row.unknown)
				if !errors.Is(err, ErrUnknown) {
					t.Errorf("error %v is not ErrUnknown", err)
				}
				return
			}
			try(t, err)
			if filepath.Base(where) != row.want || len(files) != 1 || files[0].Size != row.size || filepath.Dir(files[0].Path) != where {
				t.Errorf("the files are %v in %s, want one of %d bytes in …/%s", files, where, row.size, row.want)
			}
		})
	}
}

func TestAModelThatIsOneFile(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"q4.gguf": "weights", "q8.gguf": "other"})
	files, where, err := Files(Model{Name: filepath.Join(dir, "q4.gguf")})
	try(t, err)
	if len(files) != 1 || files[0] != (File{filepath.Join(dir, "q4.gguf"), 7}) || where != dir {
		t.Errorf("the files are %v in %s", files, where)
	}
}

func TestFilesystemsHaveNames(t *testing.T) {
	if got := Filesystem("/proc"); got != "0x9fa0" {
		t.Errorf("/proc is %s, want its magic", got)
	}
	if got := Filesystem("/nowhere"); got != "unknown" {
		t.Errorf("what is not there is %s, want unknown", got)
	}
	if got := Filesystem(mount(t, "size=1m")); got != "tmpfs" {
		t.Errorf("a tmpfs is %s", got)
	}
}

func TestSegmentsCoverFiles(t *testing.T) {
	got := segments([]File{{"a", 0}, {"b", 1}, {"c", segmentSize}, {"d", 2*segmentSize + 5}})
	want := []segment{{1, 0, 1}, {2, 0, segmentSize}, {3, 0, segmentSize}, {3, segmentSize, segmentSize}, {3, 2 * segmentSize, 5}}
	if !slices.Equal(got, want) {
		t.Errorf("segments are %v, want %v", got, want)
	}
}

// sameFiles fails the test unless a folder holds exactly these files.
func sameFiles(t *testing.T, dir string, want map[string]string) {
	t.Helper()
	found := 0
	try(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		found++
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		text, err := os.ReadFile(path)
		if w, ok := want[name]; err == nil && (!e.Type().IsRegular() || !ok || !bytes.Equal(text, []byte(w))) {
			t.Errorf("%s is %s with %d bytes, want a file with %d: %v", name, e.Type(), len(text), len(w), ok)
		}
		return err
	}))
	if found != len(want) {
		t.Errorf("%d files are in %s, want %d", found, dir, len(want))
	}
}
