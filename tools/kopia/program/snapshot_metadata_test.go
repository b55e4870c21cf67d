package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/manifest"
)

// storage is a SnapshotMetadata service, which answers with its messages and then its error.
type storage struct {
	address, ca string

	messages [][]byte
	err      error
	method   string
	request  []byte
}

func newStorage(t *testing.T) *storage {
	t.Helper()

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)

	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)

	made := &storage{
		address: listener.Addr().String(),
		ca:      string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
	}
	own := &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}
	server := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(own)), grpc.ForceServerCodec(encoded{}), grpc.UnknownServiceHandler(made.answer),
	)

	go server.Serve(listener) //nolint:errcheck // it ends with the test
	t.Cleanup(server.Stop)

	return made
}

func (s *storage) answer(_ any, stream grpc.ServerStream) error {
	s.method, _ = grpc.MethodFromServerStream(stream)
	if err := stream.RecvMsg(&s.request); err != nil {
		return err
	}

	for _, message := range s.messages {
		if err := stream.SendMsg(&message); err != nil {
			return err
		}
	}

	return s.err
}

func (s *storage) query(base string) *changeQuery {
	return &changeQuery{
		Address: s.address, CA: s.ca, Token: "token", Namespace: "velero", Snapshot: "now", Base: base, TimeoutSeconds: 20,
	}
}

// says makes it answer with one message for each two extents.
func (s *storage) says(kind uint64, capacity int, extents ...extent) {
	s.messages = nil

	for start := 0; start == 0 || start < len(extents); start += 2 {
		message := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), kind)
		message = protowire.AppendVarint(protowire.AppendTag(message, 2, protowire.VarintType), uint64(capacity))

		for _, one := range extents[start:min(len(extents), start+2)] {
			content := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), uint64(one.offset))
			content = protowire.AppendVarint(protowire.AppendTag(content, 2, protowire.VarintType), uint64(one.length))
			message = protowire.AppendBytes(protowire.AppendTag(message, 3, protowire.BytesType), content)
		}

		s.messages = append(s.messages, message)
	}
}

// differences returns the parts of some sectors in which two devices differ, as far as both have them.
func differences(old, content []byte, sectors int) (found []extent) {
	for at := 0; at < min(len(old), len(content)); at += sectors * 512 {
		end := min(at+sectors*512, len(old), len(content))
		if !bytes.Equal(old[at:end], content[at:end]) {
			found = append(found, extent{int64(at), int64(end - at)})
		}
	}

	return found
}

// TestOnlyChangedBlocksAreRead backs a device up again and again, whose driver knows what has changed.
func TestOnlyChangedBlocksAreRead(t *testing.T) {
	b, random, from := newBench(t), newSeeded(), newStorage(t)
	content := make([]byte, 20*blockSize+512)
	copy(content[3*blockSize+100:], random.bytes(2*blockSize))

	var parent manifest.ID

	old := make([]byte, len(content))

	for round := range 30 {
		query := from.query("")
		if parent != "" {
			query = from.query("before")
		}

		from.says(variableLength, len(content), differences(old, content, 1+round)...)

		made := b.writeDevice(content, blockDecision{Parent: parent, Changes: query})
		if made.ChangesFault != "" || made.ParentFault != "" {
			t.Fatal(made.ChangesFault, made.ParentFault)
		}

		// Two blocks more than have changed, the end, and what is checked.
		most := int64(checkedBlocks+2+blocks(int64(max(0, len(content)-len(old))+1)))*blockSize + made.ChangedBytes
		if made.ReadBytes > most {
			t.Errorf("%v bytes were read, and not at most %v", made.ReadBytes, most)
		}

		if restored, _, err := b.readDevice(made, len(content), random.bytes(len(content)), false); err != nil || !bytes.Equal(restored, content) {
			t.Fatalf("the restored device differs after %v rounds: %v", round, err)
		}

		parent, old, content = made.Snapshot.ID, content, bytes.Clone(content)

		switch random.IntN(4) {
		case 0:
			content = append(content, random.bytes(512*random.IntN(4096))...)
		case 1:
			content = content[:len(content)-512*random.IntN(4096)]
		case 2:
			at := random.IntN(len(content))
			clear(content[at:min(len(content), at+blockSize)])
		default:
			copy(content[random.IntN(len(content)):], random.bytes(random.IntN(blockSize)))
		}
	}
}

func TestServiceIsAskedAsItsProtocolSays(t *testing.T) {
	from := newStorage(t)
	from.says(fixedLength, blockSize, extent{0, 512}, extent{1024, 512}, extent{2048, 512})

	for base, want := range map[string]string{
		"":     "/snapshotmetadata.SnapshotMetadata/GetMetadataAllocated \n\x05token\x12\x06velero\x1a\x03now",
		"then": "/snapshotmetadata.SnapshotMetadata/GetMetadataDelta \n\x05token\x12\x06velero\x1a\x04then\"\x03now",
	} {
		_, err := from.query(base).ask(t.Context(), blockSize)
		if asked := from.method + " " + string(from.request); err != nil || asked != want {
			t.Errorf("%q was asked, not %q: %v", asked, want, err)
		}
	}
}

// TestDoubtMeansThatAllIsRead has a service that answers wrongly: each time the backup is complete, and says why it read all.
func TestDoubtMeansThatAllIsRead(t *testing.T) {
	b, random, from := newBench(t), newSeeded(), newStorage(t)
	old := random.bytes(4 * blockSize)
	first := b.writeDevice(old, blockDecision{})
	content := append(random.bytes(blockSize), old[blockSize:]...)

	for want, wrong := range map[string]func(query *changeQuery){
		"kind 3":                       func(*changeQuery) { from.says(3, len(content), extent{0, blockSize}) },
		"kind 0":                       func(*changeQuery) { from.messages = [][]byte{{}} },
		"kind 1, after 2":              func(*changeQuery) { from.messages = append(from.messages, []byte{8, 1}) },
		"4194305 bytes, not 4194304":   func(*changeQuery) { from.says(variableLength, len(content)+1, extent{0, blockSize}) },
		"4096 bytes at 0, after 8192":  func(*changeQuery) { from.says(fixedLength, len(content), extent{4096, 4096}, extent{0, 4096}) },
		"4096 bytes at 2048":           func(*changeQuery) { from.says(fixedLength, len(content), extent{0, 4096}, extent{2048, 4096}) },
		"names 0 bytes":                func(*changeQuery) { from.says(variableLength, len(content), extent{0, 0}) },
		"names -1 bytes":               func(*changeQuery) { from.says(variableLength, len(content), extent{0, -1}) },
		"bytes at -4096":               func(*changeQuery) { from.says(variableLength, len(content), extent{-4096, 8192}) },
		"9223372036854775807 bytes":    func(*changeQuery) { from.says(variableLength, len(content), extent{4096, 1<<63 - 1}) },
		"4096 bytes at 4194304":        func(*changeQuery) { from.says(variableLength, len(content), extent{4 * blockSize, 4096}) },
		"512 bytes, and others of 256": func(*changeQuery) { from.says(fixedLength, len(content), extent{0, 256}, extent{512, 512}) },
		"is damaged":                   func(*changeQuery) { from.messages = [][]byte{{8, 2, 26, 9, 1}} },
		"bytes at 0, which have":       func(*changeQuery) { from.says(variableLength, len(content), extent{2 * blockSize, 512}) },
		"NotFound: no such snapshot":   func(*changeQuery) { from.err = status.Error(codes.NotFound, "no such snapshot") },
		"Internal: it broke":           func(*changeQuery) { from.err = status.Error(codes.Internal, "it broke") },
		"DeadlineExceeded":             func(query *changeQuery) { query.TimeoutSeconds = 1e-9 },
		"certificate of its authority": func(query *changeQuery) { query.CA = "none" },
		"the parent: there is none":    nil,
	} {
		from.says(variableLength, len(content), extent{0, blockSize})
		from.err = nil

		query, decided := from.query("before"), blockDecision{Parent: first.Snapshot.ID}
		if decided.Changes = query; wrong == nil {
			decided.Parent = ""
		} else {
			wrong(query)
		}

		made := b.writeDevice(content, decided)
		if !strings.Contains(made.ChangesFault, want) || made.ReadBytes < int64(len(content)) {
			t.Errorf("%v bytes were read, since %q, not %q", made.ReadBytes, made.ChangesFault, want)
		}

		restored, _, err := b.readDevice(made, len(content), make([]byte, len(content)), false)
		if err != nil || !bytes.Equal(restored, content) {
			t.Errorf("the restored device differs when %v: %v", want, err)
		}
	}

	from.says(variableLength, len(content))
	from.err = nil

	if _, err := from.query("").ask(t.Context(), int64(len(content))); err == nil || !strings.Contains(err.Error(), "nothing is allocated") {
		t.Errorf("%v", err)
	}
}

// TestListThatEndsEarlyIsFound has lists that lack one block of data.
func TestListThatEndsEarlyIsFound(t *testing.T) {
	b, random, from := newBench(t), newSeeded(), newStorage(t)

	for _, one := range []struct{ data, named, from int }{{11, 10, 0}, {1, 96, 96}} {
		content := make([]byte, 128*blockSize)
		copy(content[one.from*blockSize:], random.bytes(one.data*blockSize))
		from.says(variableLength, len(content), extent{0, int64(one.named) * blockSize})

		made := b.writeDevice(content, blockDecision{Changes: from.query("")})
		if !strings.HasPrefix(made.ChangesFault, "it does not name the bytes at ") || made.ReadBytes < int64(len(content)) {
			t.Errorf("%+v: %v bytes were read, since %q", one, made.ReadBytes, made.ChangesFault)
		}
	}
}

// TestBlocksThatTheRepositoryLacksAreReadAgain has a parent whose blocks are not all there any more.
func TestBlocksThatTheRepositoryLacksAreReadAgain(t *testing.T) {
	b, from, content := newBench(t), newStorage(t), newSeeded().bytes(20*blockSize)
	first := b.writeDevice(content, blockDecision{})

	list, err := loadBlocks(t.Context(), b.rep, first.Snapshot.RootObjectID())
	must(t, err)

	lost, _, _ := list[15].Object.ContentID()

	must(t, repo.WriteSession(t.Context(), b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		return w.(repo.DirectRepositoryWriter).ContentManager().DeleteContent(ctx, lost) //nolint:forcetypeassert // tests
	}))
	must(t, b.rep.Refresh(t.Context()))
	from.says(variableLength, len(content), extent{0, 512})

	made := b.writeDevice(content, blockDecision{Parent: first.Snapshot.ID, Changes: from.query("before")})
	if made.ChangesFault != "the parent: block 15 is deleted" || made.ReadBytes != int64(len(content)) || made.ChangedBytes != 0 {
		t.Errorf("%+v", made)
	}

	list, err = loadBlocks(t.Context(), b.rep, made.Snapshot.RootObjectID())
	must(t, err)
	must(t, list.verify(t.Context(), b.rep))
}

// TestNothingIsTakenFromAListThatIsNotValid has a parent whose list has blocks of the repository, each at another place.
func TestNothingIsTakenFromAListThatIsNotValid(t *testing.T) {
	b, from, content := newBench(t), newStorage(t), newSeeded().bytes(3*blockSize)
	list := b.content(indexOf(b, b.writeDevice(content, blockDecision{}).Snapshot.RootObjectID()))
	parent := b.saveSnapshot(b.writeList(strings.Replace(list, `"s":1048576`, `"s":1048577`, 1)))

	from.says(variableLength, len(content))

	made := b.writeDevice(content, blockDecision{Parent: parent, Changes: from.query("before")})
	if !strings.HasPrefix(made.ParentFault, "entry 1 of the list of blocks") || made.ChangesFault != "the parent: "+made.ParentFault ||
		made.ChangedBytes != int64(len(content)) || made.ReadBytes != int64(len(content)) {
		t.Errorf("%+v", made)
	}
}

func TestErrorOfRepeatedCallsIsTheOneOfTheLast(t *testing.T) {
	repeated := "max retries exhausted: failed after 4 attempts: rpc error: code = Unavailable desc = it starts"
	if found := explain(status.Error(codes.Unavailable, repeated)); found.Error() != "Unavailable: it starts" {
		t.Error(found)
	}
}

// TestDamagedAnswerMarksNothingElse changes bytes of an answer: each is refused, or marks blocks of this device.
func TestDamagedAnswerMarksNothingElse(t *testing.T) {
	random, from := newSeeded(), newStorage(t)
	from.says(variableLength, 9*blockSize, extent{0, 700}, extent{3 * blockSize, 2 * blockSize})

	for range 20_000 {
		message := bytes.Clone(from.messages[0])
		for range 1 + random.IntN(3) {
			message[random.IntN(len(message))] = byte(random.IntN(256))
		}

		marked := &markedBlocks{size: 9 * blockSize, set: make([]bool, 9)}
		if found, err := decodeMetadata(message[:1+random.IntN(len(message))]); err == nil && marked.add(found) == nil && marked.end > marked.size {
			t.Fatalf("%v marks bytes up to %v", message, marked.end)
		}
	}
}
