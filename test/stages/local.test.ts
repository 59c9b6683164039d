// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Fs from "node:fs"
import * as Os from "node:os"
import * as Path from "node:path"
import * as DateTime from "effect/DateTime"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import { AccountsConfig } from "../../layers/AccountsConfig.ts"
import { MailboxMaildir } from "../../layers/MailboxMaildir.ts"
import * as Decode from "../../src/config/Decode.ts"
import * as Ini from "../../src/config/Ini.ts"
import * as Header from "../../src/mail/Header.ts"
import type * as Stage from "../../src/pipeline/Stage.ts"
import type * as Verdict from "../../src/pipeline/Verdict.ts"
import local from "../../stages/local.ts"

const die = Effect.die(new Error("not loaded"))
const token = "0123456789abcdef0123456789abcdef"
const message = (more: Partial<Stage.WithBody> = {}): Stage.WithBody => ({
  id: 1,
  rev: 0,
  token,
  sender: "sender@example.org",
  recipients: ["dave@ours.example"],
  fromHeader: null,
  subject: null,
  section: "local",
  state: {},
  sizeBytes: 100,
  hdrFlags: null,
  messageId: null,
  listId: null,
  settings: {},
  attempts: 0,
  repeat: false,
  receivedAt: DateTime.makeUnsafe(1_700_000_000_999),
  header: Header.fromText("Subject: Hello\r\nTo: dave@ours.example\r\n"),
  body: Buffer.from("one\r\ntwo\r\n"),
  needHeaders: die,
  needPrefix: () => die,
  needBody: die,
  ...more
})

const read = (home: string, lines: ReadonlyArray<string>) => {
  const text = ["[stage-local]", ...lines].join("\n")
  const [section] = Ini.assemble(Ini.parse("pepsi.conf", text).items)
  const environment = { PEPSI_HOME: home }
  return Decode.decode(section!, local.settings, { base: "/", environment, paths: new Map() })
}

const names = ["dave", "ann", "bob"]
const people = AccountsConfig({ domains: ["ours.example"], delimiter: "+", localParts: names })
const services = Layer.merge(people, MailboxMaildir({ host: "mail.ours.example" }))

interface World {
  readonly home: string
  readonly run: (
    mail: Stage.WithBody,
    lines?: ReadonlyArray<string>
  ) => Effect.Effect<Verdict.Verdict, Verdict.WorldFailure>
  readonly box: (name: string, sub?: string) => ReadonlyArray<string>
  /** The only file of a mailbox. */
  readonly text: (name: string) => string
}

const inHome = (use: (world: World) => Effect.Effect<void, Verdict.WorldFailure>) =>
  Effect.acquireRelease(
    Effect.sync(() => Fs.mkdtempSync(Path.join(Os.tmpdir(), "pepsi-local-"))),
    (home) => Effect.sync(() => Fs.rmSync(home, { recursive: true, force: true }))
  ).pipe(
    Effect.flatMap((home) => {
      const box = (name: string, sub = "new"): ReadonlyArray<string> => {
        const path = `${home}/mail/${name}/${sub}`
        return Fs.existsSync(path) ? Fs.readdirSync(path) : []
      }
      return use({
        home,
        box,
        text: (name) => {
          const files = box(name)
          assert.strictEqual(files.length, 1)
          return Fs.readFileSync(`${home}/mail/${name}/new/${files[0]}`, "latin1")
        },
        run: (mail, lines = []) => {
          const { problems, values } = read(home, lines)
          assert.deepStrictEqual(problems, [])
          return local.run(mail, values).pipe(Effect.provide(services))
        }
      })
    })
  )

const problem = (text: string): string | undefined =>
  read("/h", [`MAILDIR = ${text}`]).problems.map(Ini.format)[0]

describe("local", () => {
  it.effect("A-LOC-1 a message becomes a file with LF line ends and its return path on top", () =>
    inHome(
      Effect.fnUntraced(function* ({ box, home, run, text }) {
        const verdict = yield* run(message())
        assert.strictEqual(verdict.decision._tag, "Done")
        const wanted =
          "Return-Path: <sender@example.org>\nDelivered-To: dave@ours.example\n" +
          "Subject: Hello\nTo: dave@ours.example\n\none\ntwo\n"
        assert.strictEqual(text("dave"), wanted)
        const name = box("dave")[0]!
        assert.match(
          name,
          new RegExp(`^1700000000\\.T${token}R[0-9a-f]{8}\\.mail\\.ours\\.example,`)
        )
        assert.isTrue(name.endsWith(`,S=${wanted.length},W=${wanted.length + 7}`))
        const { mode, uid } = Fs.statSync(`${home}/mail/dave/new/${name}`)
        assert.deepStrictEqual([mode & 0o7777, uid], [0o600, process.getuid!()])
      })
    )
  )

  it.effect("A-LOC-2 a second run finds the file of the first", () =>
    inHome(
      Effect.fnUntraced(function* ({ box, run }) {
        yield* run(message())
        const before = box("dave")
        const changed = Header.prepend(message().header, "Authentication-Results: other\r\n")
        assert.strictEqual(
          (yield* run(message({ repeat: true, header: changed }))).decision._tag,
          "Done"
        )
        // A try that failed may have left the file as well.
        assert.strictEqual(
          (yield* run(message({ attempts: 1, header: changed }))).decision._tag,
          "Done"
        )
        assert.deepStrictEqual(box("dave"), before)
      })
    )
  )

  it.effect("A-LOC-3 a second run finds the file where a reader has put it", () =>
    inHome(
      Effect.fnUntraced(function* ({ box, home, run }) {
        yield* run(message())
        const name = box("dave")[0]!
        Fs.renameSync(`${home}/mail/dave/new/${name}`, `${home}/mail/dave/cur/${name}:2,S`)
        assert.strictEqual((yield* run(message({ repeat: true }))).decision._tag, "Done")
        assert.deepStrictEqual([box("dave"), box("dave", "cur")], [[], [`${name}:2,S`]])
      })
    )
  )

  it.effect("A-LOC-6 a mailbox that is a symbolic link is refused and waits", () =>
    inHome(
      Effect.fnUntraced(function* ({ home, run }) {
        Fs.mkdirSync(`${home}/etc`)
        Fs.mkdirSync(`${home}/mail`)
        Fs.symlinkSync(`${home}/etc`, `${home}/mail/dave`)
        const { decision, patch } = yield* run(message())
        assert.deepInclude(decision, { _tag: "Defer", reason: "4.3.5 mailbox: ELOOP at lstat" })
        assert.deepStrictEqual(patch, {})
        assert.deepStrictEqual(Fs.readdirSync(`${home}/etc`), [])
      })
    )
  )

  it.effect("each recipient gets a file that names no other", () =>
    inHome(
      Effect.fnUntraced(function* ({ box, run, text }) {
        const recipients = [
          "dave@ours.example",
          "ann@ours.example",
          "Bob+news@OURS.example",
          "bob@ours.example"
        ]
        assert.strictEqual((yield* run(message({ recipients }))).decision._tag, "Done")
        assert.notInclude(text("ann"), "bob")
        assert.include(text("dave"), "Delivered-To: dave@ours.example\n")
        assert.strictEqual(box("bob").length, 2)
      })
    )
  )

  it.effect("who is delivered to leaves the message, who is not stays", () =>
    inHome(
      Effect.fnUntraced(function* ({ box, home, run }) {
        Fs.mkdirSync(`${home}/mail`)
        Fs.writeFileSync(`${home}/mail/ann`, "no directory")
        const recipients = ["dave@ours.example", "ann@ours.example"]
        const { children, decision, patch } = yield* run(message({ recipients }))
        assert.strictEqual(decision._tag, "Defer")
        assert.deepStrictEqual([patch, children], [{ recipients: ["ann@ours.example"] }, []])
        assert.strictEqual(box("dave").length, 1)
        Fs.unlinkSync(`${home}/mail/ann`)
        const later = yield* run(message({ recipients: ["ann@ours.example"], attempts: 1 }))
        assert.strictEqual(later.decision._tag, "Done")
      })
    )
  )

  it.effect("who is not here any more fails, also beside one who waits", () =>
    inHome(
      Effect.fnUntraced(function* ({ box, home, run }) {
        const alone = yield* run(message({ recipients: ["gone@ours.example"] }))
        assert.deepInclude(alone.decision, { _tag: "Fail", class: "recipient", status: "5.1.1" })
        assert.deepStrictEqual(alone.patch, {})
        const foreign = yield* run(message({ recipients: ["dave@x.example", "dave@ours.example"] }))
        assert.deepInclude(foreign.decision, { _tag: "Fail", status: "5.1.1" })
        assert.deepStrictEqual(foreign.patch, { recipients: ["dave@x.example"] })
        Fs.writeFileSync(`${home}/mail/ann`, "no directory")
        const recipients = ["gone@ours.example", "ann@ours.example", "bob@ours.example"]
        const both = yield* run(message({ recipients }))
        assert.strictEqual(both.decision._tag, "Defer")
        assert.deepStrictEqual(both.patch, { recipients: ["ann@ours.example"] })
        assert.deepStrictEqual(both.children, [
          { key: "gone@ours.example", to: "local", recipients: ["gone@ours.example"] }
        ])
        assert.strictEqual(box("bob").length, 1)
      })
    )
  )

  it.effect("the null sender has an empty return path, and a foreign one goes", () =>
    inHome(
      Effect.fnUntraced(function* ({ run, text }) {
        const forged = "Return-Path: <forged@x>\r\nSubject: a\r\nRETURN-PATH: <x>\r\n y\r\n"
        const header = Header.fromText(forged)
        yield* run(message({ sender: "", header }))
        assert.strictEqual(
          text("dave"),
          "Return-Path: <>\nDelivered-To: dave@ours.example\nSubject: a\n\none\ntwo\n"
        )
      })
    )
  )

  it.effect("R67: an address with a line end in it makes no header field", () =>
    inHome(
      Effect.fnUntraced(function* ({ run, text }) {
        yield* run(
          message({ sender: "a@b\r\nBcc: evil@x", state: { orig_rcpt: "list@x\n\nbody" } }),
          ["DELIVERED_TO = no"]
        )
        const wanted = "Return-Path: <a@bBcc: evil@x>\nX-Original-To: list@xbody\nSubject"
        assert.isTrue(text("dave").startsWith(wanted))
      })
    )
  )

  it.effect("X-Original-To is there when the address has changed", () =>
    inHome(
      Effect.fnUntraced(function* ({ run, text }) {
        yield* run(message({ state: { orig_rcpt: "dave@ours.example" } }))
        assert.notInclude(text("dave"), "X-Original-To")
        yield* run(
          message({ recipients: ["ann@ours.example"], state: { orig_rcpt: "team@ours.example" } })
        )
        assert.include(
          text("ann"),
          "Delivered-To: ann@ours.example\nX-Original-To: team@ours.example\n"
        )
      })
    )
  )

  it.effect("MAILDIR puts the domain in its place, and a home must be there", () =>
    inHome(
      Effect.fnUntraced(function* ({ box, home, run }) {
        assert.strictEqual(
          (yield* run(message(), ["MAILDIR = $PEPSI_HOME/mail/{domain}/{mailbox}"])).decision._tag,
          "Done"
        )
        assert.strictEqual(box("ours.example/dave").length, 1)
        const away = yield* run(message(), ["MAILDIR = $PEPSI_HOME/home/{mailbox}/Maildir"])
        assert.deepInclude(away.decision, {
          _tag: "Defer",
          reason: "4.2.1 mailbox: ENOENT at stat"
        })
        assert.deepStrictEqual(Fs.readdirSync(`${home}/home`), [])
      })
    )
  )

  it("MAILDIR is refused when it leads nowhere", () => {
    assert.match(
      problem("/mail")!,
      /^pepsi\.conf:2: \[stage-local\] MAILDIR: '\/mail' is not a directory with \{mailbox\}/
    )
    assert.match(problem("/mail/{user}")!, /has \{user\}, where only/)
    assert.isUndefined(problem("/mail/{mailbox}"))
  })
})
