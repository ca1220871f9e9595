package plan

import (
	"os"
	"path/filepath"
	"testing"

	"vllmtuner/serverctl/weights"
	"vllmtuner/tuner/studyfile"
)

func TestServersLoadTheCopyOfTheModel(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	for _, dir := range []string{from, to} {
		for _, name := range []string{"q4.gguf", "q8.gguf"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, row := range []struct {
		name, model, want string
		files             int
	}{
		{"a model's directory becomes the directory of the copy", from, to, 2},
		{"a GGUF file becomes the file with its name in the copy", filepath.Join(from, "q4.gguf"), filepath.Join(to, "q4.gguf"), 1},
		{"a name on the hub becomes the directory of the copy", "nvidia/Llama-3.3-70B-Instruct-FP8", to, 2},
	} {
		s := &Server{Model: row.model, file: &studyfile.File{Model: row.model}}
		files, err := s.UseCopy(to)
		if err != nil || s.Model != row.want || len(files) != row.files {
			t.Errorf("%s: the servers load %s with %d files, %v, want %s with %d files", row.name, s.Model, len(files), err, row.want, row.files)
		}
		if row.files == 1 && len(files) == 1 && files[0] != (weights.File{Path: row.want, Size: 7}) {
			t.Errorf("%s: the file is %+v, want %s", row.name, files[0], row.want)
		}
	}
}
